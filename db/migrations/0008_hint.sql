-- 0008_hint: rows of other people's tables, kept as they stand.
-- Before this, what somebody had tuned elsewhere was lost: the search began from nothing.
-- A hint is never run unmeasured: those of kind `tuned` are tried first when their problem is tuned here.
CREATE TABLE hint (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER REFERENCES problem,                  -- its plain case (threads 0, ieee); NULL: we have no words for it
    format TEXT NOT NULL CHECK (length(format) <= 40),      -- aiter-csv, triton-json, tunableop ...
    family TEXT NOT NULL CHECK (length(family) <= 200),     -- in the file's own words
    kind TEXT NOT NULL CHECK (kind IN ('tuned', 'untuned')),
    backend TEXT NOT NULL CHECK (length(backend) <= 200),   -- '' where the row names none; may be one we do not have
    config TEXT NOT NULL CHECK (length(config) <= 4096),
    arch TEXT NOT NULL CHECK (length(arch) <= 200),         -- where it was tuned, '' when the row does not tell
    units INTEGER NOT NULL,                                 -- SMs or CUs, 0 when it does not tell
    us REAL CHECK (us > 0),                                 -- there, by its author's clock; NULL: no valid time
    source TEXT NOT NULL CHECK (length(source) <= 4096),    -- the file; importing it again replaces its rows
    line INTEGER NOT NULL,
    text TEXT NOT NULL CHECK (length(text) <= 65536),       -- the whole row, as JSON
    imported_us INTEGER NOT NULL,
    UNIQUE (source, line)
) STRICT;
CREATE INDEX hint_by_problem ON hint (problem_id);

CREATE VIEW hints AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.kind, h.backend, h.config, h.arch, h.units, h.us, h.format, h.family AS table_family, h.source, h.line,
    h.text AS row, h.imported_us AS imported
FROM hint h LEFT JOIN problem p ON p.id = h.problem_id;
