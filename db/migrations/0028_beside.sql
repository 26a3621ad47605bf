-- 0028_beside: beside which kernels of serving engines a solution was raced, and which operators of theirs lack that.
-- Before this, a solution that had beaten torch's own product served an engine's operator, whose kernel may be faster.
ALTER TABLE solution ADD COLUMN beside TEXT NOT NULL DEFAULT ''
    CHECK (length(beside) <= 2048);                         -- JSON of configs/beside.py; '' where none was in the race
ALTER TABLE demand ADD COLUMN wanted TEXT NOT NULL DEFAULT ''
    CHECK (length(wanted) <= 512);                          -- engines' operators whose calls the solution may not serve
ALTER TABLE demand ADD COLUMN wanted_of INTEGER;            -- that solution; it says nothing of a later one
CREATE INDEX demand_wanted ON demand (wanted_of) WHERE wanted <> '';

DROP VIEW solutions;
CREATE VIEW solutions AS
SELECT *,
    round(100.0 * (1 - us / baseline_us), 1) AS faster_percent,
    datetime(published / 1000000, 'unixepoch') AS published_at,
    datetime(retired / 1000000, 'unixepoch') AS retired_at
FROM (
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, wscale, scale_dtype, wscale_dtype,
    scale_layout, wscale_layout, layout, weight_state, packing, math_mode, deterministic, batch_invariant,
    threads, experts, topk, "inter", act,
    device, mode, covers, backend, config, us, baseline_us, speedup,
    hit_calls * (baseline_us - us) * price AS saved_us, hit_calls,
    gain_low, err, baseline_err, tflops, gb_s, environment, stamp, generation, state, published, retired, reason, others, recheck, beside
FROM (
    SELECT p.text AS problem, p.*, h.key AS device, s.mode, s.covers, s.backend, s.config, s.us, s.baseline_us,
        s.baseline_us / s.us AS speedup,
        s.hits_before
        + max(CASE WHEN s.hits_to IS NOT NULL OR s.retired_generation IS NOT NULL THEN coalesce(s.hits_to - coalesce(s.hits_from, 0), 0)
            ELSE coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = s.id), 0) - coalesce(s.hits_from, 0) END, 0)
        + CASE WHEN EXISTS (SELECT 1 FROM sighting_before) THEN coalesce((
            SELECT sum(b.calls) FROM hits_before b WHERE b.solution_id = s.id), 0) ELSE 0 END AS hit_calls,
        CASE WHEN s.others > 0.15 THEN coalesce((
            SELECT CASE WHEN sum(d.sampled_calls) >= 4
                THEN sum(d.sampled_us) / sum(d.sampled_calls) / s.baseline_us END
            FROM reach r
            JOIN demand d ON d.environment_id = r.environment_id AND d.problem_id = r.problem_id
            WHERE r.solution_id = s.id
        ), 1.0) ELSE 1.0 END AS price,
        s.gain_low, s.err, s.baseline_err, p.flops / s.us / 1e6 AS tflops, p.bytes / s.us / 1e3 AS gb_s,
        e.key AS environment, s.stamp, s.generation, s.state, s.published_us AS published, s.retired_us AS retired,
        s.reason, s.others, s.recheck, s.beside
    FROM solution s
    JOIN problem p ON p.id = s.problem_id
    JOIN device h ON h.id = s.device_id
    JOIN environment e ON e.id = s.environment_id
)
);

DROP VIEW frozen;
CREATE VIEW frozen AS
SELECT *,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, sum(g.calls) AS calls, s.generation, max(g.last_seen_us) AS last_seen
FROM every_sighting g
JOIN demand d ON d.problem_id = g.problem_id AND d.environment_id = g.environment_id
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id
WHERE g.graph = 1 AND g.outcome = 'miss' AND s.state <> 'default_best'
    AND g.last_seen_us > s.published_us + 10000000
    AND NOT (d.wanted <> '' AND d.wanted_of = d.solution_id)
GROUP BY g.problem_id, g.environment_id, g.run_id
);

-- Calls of engines' operators that run the engine's own kernel since the solution was not raced beside it.
CREATE VIEW unraced AS
SELECT p.text AS problem, h.key AS device, d.wanted AS operators, s.backend, s.beside, d.calls,
    d.calls - d.exact_calls - d.padded_calls AS missed, d.last_seen_us AS last_seen,
    datetime(d.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM demand d
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id
JOIN device h ON h.id = e.device_id
WHERE d.wanted <> '' AND d.wanted_of = d.solution_id;
