-- 0004_compiled: GEMMs that torch.compile put inside kernels of its own.
-- Before this, a model compiled with max-autotune looked as if it had fewer GEMMs than it has.
-- Presence, not calls: what was there at a compilation. Whatever is counted at run time stands in `sighting`.
CREATE TABLE compiled_gemm (
    problem_id INTEGER NOT NULL REFERENCES problem,         -- math_mode and deterministic are not known there
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    kernel TEXT NOT NULL CHECK (length(kernel) <= 200),     -- what kind of template Inductor chose
    first_seen_us INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (problem_id, environment_id, run_id, kernel)
) STRICT, WITHOUT ROWID;

CREATE VIEW compiled AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, c.kernel, c.first_seen_us AS first_seen, c.last_seen_us AS last_seen
FROM compiled_gemm c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id;
