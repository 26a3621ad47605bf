-- What the steps beside this file leave in a new database: written by `python -m gemmtuned.db.migrations.whole`, never
-- by hand. Each statement is as SQLite keeps it; a line `-- next` stands between two of them.
-- last step: 0031_covered

-- next
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
)
-- next
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name")
-- next
CREATE TABLE problem (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL CHECK (length(text) <= 512),         -- str(Problem), for people
    rest TEXT NOT NULL CHECK (length(rest) <= 512),         -- all columns but m: equal for problems that differ in M alone
    family TEXT NOT NULL,
    batch INTEGER NOT NULL CHECK (batch BETWEEN 1 AND 2147483647),
    m INTEGER NOT NULL CHECK (m BETWEEN 1 AND 2147483647),
    n INTEGER NOT NULL CHECK (n BETWEEN 1 AND 2147483647),
    k INTEGER NOT NULL CHECK (k BETWEEN 1 AND 2147483647),
    bias INTEGER NOT NULL CHECK (bias IN (0, 1)),
    dtype TEXT NOT NULL,
    wdtype TEXT NOT NULL,
    out_dtype TEXT NOT NULL,
    scale TEXT NOT NULL,
    layout TEXT NOT NULL,
    weight_state TEXT NOT NULL,
    math_mode TEXT NOT NULL,
    deterministic INTEGER NOT NULL CHECK (deterministic IN (0, 1)),
    threads INTEGER NOT NULL,
    experts INTEGER,
    topk INTEGER,
    "inter" INTEGER,
    act TEXT,
    m_fine INTEGER NOT NULL,                                -- AITER's padded M, level 0
    m_coarse INTEGER NOT NULL,                              -- and level 1
    flops REAL NOT NULL,                                    -- REAL: four dimensions of 2^31 leave int64
    bytes REAL NOT NULL, wscale TEXT NOT NULL DEFAULT 'none', scale_dtype TEXT NOT NULL DEFAULT 'fp32', wscale_dtype TEXT NOT NULL DEFAULT 'fp32', scale_layout TEXT NOT NULL DEFAULT 'row', wscale_layout TEXT NOT NULL DEFAULT 'row', packing TEXT NOT NULL DEFAULT '', operands TEXT NOT NULL DEFAULT '', batch_invariant INTEGER NOT NULL DEFAULT 0 CHECK (batch_invariant IN (0, 1)),
    UNIQUE (rest, m)
) STRICT
-- next
CREATE TABLE device (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE CHECK (length(key) <= 512),
    kind TEXT NOT NULL,                                     -- cpu, cuda, rocm
    name TEXT NOT NULL,
    arch TEXT NOT NULL,
    units INTEGER NOT NULL
) STRICT
-- next
CREATE TABLE roofline (
    kind TEXT PRIMARY KEY,
    flops_per_us REAL NOT NULL,
    bytes_per_us REAL NOT NULL,
    call_us REAL NOT NULL
) STRICT, WITHOUT ROWID
-- next
INSERT INTO roofline VALUES ('cpu', 50000.0, 10000.0, 0.0)
-- next
INSERT INTO roofline VALUES ('cuda', 100000000.0, 1500000.0, 4.0)
-- next
INSERT INTO roofline VALUES ('rocm', 100000000.0, 1500000.0, 4.0)
-- next
CREATE TABLE environment (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE CHECK (length(key) <= 8192),   -- Environment.key
    device_id INTEGER NOT NULL REFERENCES device,
    first_seen_us INTEGER NOT NULL
, came_as TEXT NOT NULL DEFAULT '') STRICT
-- next
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(name) <= 512)
) STRICT
-- next
CREATE TABLE "sighting_before" (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    hour INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('miss', 'exact', 'padded')),
    graph INTEGER NOT NULL CHECK (graph IN (0, 1)),
    calls INTEGER NOT NULL CHECK (calls >= 0),
    sampled_calls INTEGER NOT NULL CHECK (sampled_calls >= 0),
    sampled_us REAL NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (problem_id, environment_id, run_id, hour, outcome, graph)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE demand (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    calls INTEGER NOT NULL CHECK (calls >= 0),
    sampled_calls INTEGER NOT NULL CHECK (sampled_calls >= 0),
    sampled_us REAL NOT NULL,
    first_seen_us INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL, solution_id INTEGER, asked_us INTEGER, recent REAL NOT NULL DEFAULT 0, recent_day INTEGER NOT NULL DEFAULT 0, exact_calls INTEGER NOT NULL DEFAULT 0, padded_calls INTEGER NOT NULL DEFAULT 0, exact_graph_calls INTEGER NOT NULL DEFAULT 0, padded_graph_calls INTEGER NOT NULL DEFAULT 0, tunable INTEGER NOT NULL DEFAULT 1 CHECK (tunable IN (0, 1)), wanted TEXT NOT NULL DEFAULT ''
    CHECK (length(wanted) <= 512), wanted_of INTEGER,
    PRIMARY KEY (environment_id, problem_id)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE work (
    problem_id INTEGER NOT NULL REFERENCES problem,         -- with the padded M when covers is not exact
    environment_id INTEGER NOT NULL REFERENCES environment,
    covers TEXT NOT NULL CHECK (covers IN ('exact', 'fine', 'coarse')),
    mode TEXT NOT NULL CHECK (mode IN ('eager', 'graph')),
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'failed')),
    owner TEXT CHECK (length(owner) <= 512),                -- "host:pid", NULL when nobody holds it
    attempts INTEGER NOT NULL,
    leased_us INTEGER NOT NULL,                             -- last lease or renewal; in the future means the clock went back
    lease_until_us INTEGER NOT NULL,                        -- in the past means free
    retry_us INTEGER NOT NULL DEFAULT 0,                    -- not before this, after a failure
    reason TEXT NOT NULL DEFAULT '', cause TEXT NOT NULL DEFAULT ''
    CHECK (cause IN ('', 'failed', 'lapsed', 'put_off', 'withdrawn', 'rolled_back')),
    PRIMARY KEY (problem_id, environment_id, covers, mode)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE trial (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    mode TEXT NOT NULL CHECK (mode IN ('eager', 'graph')),
    backend TEXT NOT NULL CHECK (length(backend) <= 200),
    config TEXT NOT NULL CHECK (length(config) <= 4096),
    phase TEXT NOT NULL CHECK (length(phase) <= 100),
    us REAL,                                                -- NULL: it did not get that far
    err REAL,                                               -- relative RMS error against the reference
    outcome TEXT NOT NULL CHECK (length(outcome) <= 100),
    note TEXT NOT NULL,
    owner TEXT NOT NULL,
    started_us INTEGER NOT NULL, stamp TEXT NOT NULL DEFAULT '' CHECK (length(stamp) <= 4096),
    UNIQUE (problem_id, environment_id, mode, backend, config, phase)
) STRICT
-- next
CREATE TABLE publication (
    generation INTEGER PRIMARY KEY,
    published_us INTEGER NOT NULL,
    installed INTEGER NOT NULL,
    retired INTEGER NOT NULL,
    note TEXT NOT NULL
) STRICT
-- next
CREATE TABLE solution (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER NOT NULL REFERENCES problem,         -- with the padded M when covers is not exact
    device_id INTEGER NOT NULL REFERENCES device,
    environment_id INTEGER NOT NULL REFERENCES environment, -- where it was measured
    mode TEXT NOT NULL CHECK (mode IN ('eager', 'graph')),
    covers TEXT NOT NULL CHECK (covers IN ('exact', 'fine', 'coarse')),
    backend TEXT NOT NULL CHECK (length(backend) <= 200),
    config TEXT NOT NULL CHECK (length(config) <= 4096),
    stamp TEXT NOT NULL CHECK (length(stamp) <= 4096),      -- where it may be used: environments with this backend at this stamp
    us REAL NOT NULL CHECK (us > 0),
    baseline_us REAL NOT NULL CHECK (baseline_us > 0),
    gain_low REAL NOT NULL,
    err REAL NOT NULL,
    baseline_err REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('published', 'default_best', 'withdrawn', 'pinned', 'stale')),
    generation INTEGER NOT NULL REFERENCES publication,
    published_us INTEGER NOT NULL,
    retired_generation INTEGER REFERENCES publication,      -- NULL while it is live
    retired_us INTEGER,
    reason TEXT NOT NULL DEFAULT '', launch TEXT NOT NULL DEFAULT ''
    CHECK (length(launch) <= 4096), conditions TEXT NOT NULL DEFAULT ''
    CHECK (length(conditions) <= 512), recheck TEXT
    CHECK (recheck IN ('conditions', 'asked', 'drift')), others REAL CHECK (others BETWEEN 0 AND 1), reported_us INTEGER, hits_from INTEGER, hits_to INTEGER, hits_before INTEGER NOT NULL DEFAULT 0, beside TEXT NOT NULL DEFAULT ''
    CHECK (length(beside) <= 2048),                        -- why it was retired
    CHECK ((retired_generation IS NULL) = (state IN ('published', 'default_best', 'pinned')))
) STRICT
-- next
CREATE INDEX solution_by_problem ON solution (problem_id, environment_id, generation)
-- next
CREATE UNIQUE INDEX solution_live ON solution (problem_id, device_id, covers, mode, backend, stamp)
    WHERE retired_generation IS NULL
-- next
CREATE TABLE quarantine (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER NOT NULL REFERENCES problem,
    device TEXT NOT NULL,
    mode TEXT NOT NULL,
    covers TEXT NOT NULL,
    backend TEXT NOT NULL,
    config TEXT NOT NULL,
    stamp TEXT NOT NULL,
    reason TEXT NOT NULL,
    run TEXT NOT NULL,
    reports INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    taken_us INTEGER, how TEXT NOT NULL DEFAULT 'failed'
    CHECK (how IN ('failed', 'wrong')), cleared_us INTEGER,
    UNIQUE (problem_id, device, mode, covers, backend, config, stamp)
) STRICT
-- next
CREATE TABLE session (
    host TEXT NOT NULL CHECK (length(host) <= 512),
    pid INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    run TEXT NOT NULL CHECK (length(run) <= 512),
    path TEXT NOT NULL,
    generation INTEGER NOT NULL,
    active_us INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    dropped INTEGER NOT NULL,
    errors INTEGER NOT NULL,
    reload_failures INTEGER NOT NULL,
    note TEXT NOT NULL,
    sqlite_version TEXT NOT NULL,
    store_dev INTEGER NOT NULL,
    store_ino INTEGER NOT NULL,
    beat_us INTEGER NOT NULL,
    ended_us INTEGER, rank INTEGER, namespace TEXT CHECK (length(namespace) <= 100), role TEXT NOT NULL DEFAULT '' CHECK (length(role) <= 60), operators TEXT NOT NULL DEFAULT '' CHECK (length(operators) <= 8192), waited_us INTEGER NOT NULL DEFAULT 0 CHECK (waited_us >= 0),
    PRIMARY KEY (host, pid, started_us)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE compiled_gemm (
    problem_id INTEGER NOT NULL REFERENCES problem,         -- math_mode and deterministic are not known there
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    kernel TEXT NOT NULL CHECK (length(kernel) <= 200),     -- what kind of template Inductor chose
    first_seen_us INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (problem_id, environment_id, run_id, kernel)
) STRICT, WITHOUT ROWID
-- next
CREATE INDEX solution_to_recheck ON solution (recheck) WHERE recheck IS NOT NULL
-- next
CREATE INDEX trial_that_killed ON trial (backend, config) WHERE outcome IN ('crash', 'hang')
-- next
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
) STRICT
-- next
CREATE INDEX hint_by_problem ON hint (problem_id)
-- next
CREATE TABLE taken (
    source TEXT NOT NULL CHECK (length(source) <= 200),     -- which file: device and inode
    sighting TEXT NOT NULL CHECK (length(sighting) <= 64),  -- hash of a sighting's key there
    calls INTEGER NOT NULL,                                 -- so much of it is in our own tables already
    sampled_calls INTEGER NOT NULL,
    sampled_us REAL NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (source, sighting)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE ingest_file (
    born INTEGER PRIMARY KEY,                               -- which file: hash of its first environment and of when that came
    since_us INTEGER NOT NULL,                              -- this pass reads rows last seen from here on
    began_us INTEGER NOT NULL,                              -- when this pass began
    seen_us INTEGER NOT NULL,                               -- the latest last_seen_us that this pass has met
    after TEXT NOT NULL,                                    -- key of the last row read in this pass, as JSON; '' at its start
    left_us INTEGER,                                        -- the earliest last_seen_us of a row left for another day
    opened_us INTEGER NOT NULL,                             -- when we first read it
    aside INTEGER NOT NULL CHECK (aside IN (0, 1)),         -- nobody writes to it any more: the last pass, over all its rows
    done INTEGER NOT NULL CHECK (done IN (0, 1))            -- all of it is in our own tables
) STRICT
-- next
CREATE TABLE ingest_row (
    born INTEGER NOT NULL,
    problem_id INTEGER NOT NULL,                            -- numbers of that file, not of this one
    environment_id INTEGER NOT NULL,
    run_id INTEGER NOT NULL,
    hour INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    graph INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    sampled_calls INTEGER NOT NULL,
    sampled_us REAL NOT NULL,
    PRIMARY KEY (born, problem_id, environment_id, run_id, hour, outcome, graph)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE ingest_new (
    day INTEGER NOT NULL,
    what TEXT NOT NULL CHECK (what IN ('problem', 'environment', 'run', 'session', 'report')),
    number INTEGER NOT NULL,
    PRIMARY KEY (day, what)
) STRICT, WITHOUT ROWID
-- next
CREATE INDEX solution_reported ON solution (reported_us) WHERE reported_us IS NOT NULL
-- next
CREATE TABLE sighting (
    hour INTEGER NOT NULL,
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    outcome TEXT NOT NULL CHECK (outcome IN ('miss', 'exact', 'padded')),
    graph INTEGER NOT NULL CHECK (graph IN (0, 1)),
    calls INTEGER NOT NULL CHECK (calls >= 0),
    sampled_calls INTEGER NOT NULL CHECK (sampled_calls >= 0), -- 0 once it is no hour any more: demand has the sum
    sampled_us REAL NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (hour, problem_id, environment_id, run_id, outcome, graph)
) STRICT, WITHOUT ROWID
-- next
CREATE VIEW every_sighting AS
SELECT problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us FROM sighting
UNION ALL
SELECT problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us
FROM sighting_before
-- next
CREATE TABLE environment_stamp (
    environment_id INTEGER NOT NULL REFERENCES environment,
    backend TEXT NOT NULL,
    kernel TEXT NOT NULL,                                   -- '' for a backend that has one stamp
    stamp TEXT NOT NULL,
    current INTEGER NOT NULL CHECK (current IN (0, 1)),
    PRIMARY KEY (environment_id, backend, kernel, stamp)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE tunable (
    environment_id INTEGER NOT NULL REFERENCES environment,
    operands TEXT NOT NULL CHECK (length(operands) <= 200), -- problem.operands
    PRIMARY KEY (environment_id, operands)
) STRICT, WITHOUT ROWID
-- next
CREATE VIEW look_up AS
SELECT d.problem_id, d.environment_id,
    coalesce(
        (SELECT s.id FROM solution s
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
                AND a.current = 1
            WHERE s.problem_id = d.problem_id AND s.device_id = e.device_id AND s.covers = 'exact'
                AND s.retired_generation IS NULL
            ORDER BY s.generation DESC LIMIT 1),
        (SELECT s.id FROM problem b
            JOIN solution s ON s.problem_id = b.id AND s.device_id = e.device_id AND s.covers = 'fine'
                AND s.retired_generation IS NULL
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
                AND a.current = 1
            WHERE b.rest = p.rest AND b.m = p.m_fine
            ORDER BY s.generation DESC LIMIT 1),
        (SELECT s.id FROM problem b
            JOIN solution s ON s.problem_id = b.id AND s.device_id = e.device_id AND s.covers = 'coarse'
                AND s.retired_generation IS NULL
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
                AND a.current = 1
            WHERE b.rest = p.rest AND b.m = p.m_coarse
            ORDER BY s.generation DESC LIMIT 1)
    ) AS solution_id
FROM demand d
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id
-- next
CREATE VIEW reach AS
SELECT s.id AS solution_id, d.problem_id, d.environment_id, s.covers, s.mode,
    CASE WHEN s.covers = 'exact' THEN CASE s.mode WHEN 'graph' THEN d.exact_graph_calls ELSE d.exact_calls END
        ELSE CASE s.mode WHEN 'graph' THEN d.padded_graph_calls ELSE d.padded_calls END END AS hits
FROM solution s
CROSS JOIN problem p ON p.id = s.problem_id
CROSS JOIN problem q ON q.rest = p.rest
    AND q.m > CASE s.covers WHEN 'exact' THEN p.m - 1 WHEN 'fine' THEN p.m - 128 ELSE p.m / 2 END
    AND q.m <= CASE WHEN s.covers = 'coarse' AND p.m >= 8192 THEN 2147483647 ELSE p.m END
    AND p.m = CASE s.covers WHEN 'exact' THEN q.m WHEN 'fine' THEN q.m_fine ELSE q.m_coarse END
CROSS JOIN environment e ON e.device_id = s.device_id
CROSS JOIN environment_stamp a ON a.environment_id = e.id AND a.backend = s.backend AND a.stamp = s.stamp
CROSS JOIN demand d ON d.environment_id = e.id AND d.problem_id = q.id
-- next
CREATE TRIGGER demand_came AFTER INSERT ON demand BEGIN
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
            WHERE l.problem_id = NEW.problem_id AND l.environment_id = NEW.environment_id),
        tunable = NOT EXISTS (SELECT 1 FROM tunable t WHERE t.environment_id = NEW.environment_id)
            OR EXISTS (SELECT 1 FROM tunable t JOIN problem p ON p.operands = t.operands
                WHERE t.environment_id = NEW.environment_id AND p.id = NEW.problem_id)
    WHERE problem_id = NEW.problem_id AND environment_id = NEW.environment_id;
END
-- next
CREATE TRIGGER solution_came AFTER INSERT ON solution BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    WHERE NEW.retired_generation IS NULL AND hits_to IS NULL AND retired_generation IS NULL AND id < NEW.id
        AND problem_id = NEW.problem_id AND environment_id = NEW.environment_id AND covers = NEW.covers AND mode = NEW.mode;
    UPDATE solution SET hits_from = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = NEW.id), 0)
    WHERE id = NEW.id AND hits_from IS NULL;
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
        WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
    WHERE (environment_id, problem_id) IN (SELECT r.environment_id, r.problem_id FROM reach r WHERE r.solution_id = NEW.id);
END
-- next
CREATE TRIGGER solution_went AFTER UPDATE OF retired_generation ON solution
WHEN NEW.retired_generation IS NOT NULL AND OLD.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = NEW.id), 0)
    WHERE id = NEW.id AND hits_to IS NULL;
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
        WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
    WHERE (environment_id, problem_id) IN (SELECT r.environment_id, r.problem_id FROM reach r WHERE r.solution_id = NEW.id);
END
-- next
CREATE VIEW unit AS
SELECT d.problem_id, d.environment_id, p.rest, p.m, d.calls, d.recent, d.recent_day, d.last_seen_us, d.asked_us,
    d.solution_id, d.tunable, coalesce(b.first_id, d.problem_id) AS unit_id,
    CASE WHEN b.first_id IS NULL THEN 'exact' ELSE 'fine' END AS covers,
    CASE WHEN b.first_id IS NULL THEN p.m ELSE p.m_fine END AS unit_m
FROM demand d
JOIN problem p ON p.id = d.problem_id
LEFT JOIN (
    SELECT s.environment_id, q.rest, q.m_fine, min(q.id) AS first_id
    FROM demand s JOIN problem q ON q.id = s.problem_id
    GROUP BY q.rest, q.m_fine, s.environment_id HAVING count(*) > 3
) b ON b.environment_id = d.environment_id AND b.rest = p.rest AND b.m_fine = p.m_fine
-- next
CREATE VIEW hits_before AS
SELECT s.id AS solution_id, g.problem_id, g.environment_id, g.run_id, g.hour, g.outcome, g.graph, g.calls
FROM reach r
JOIN solution s ON s.id = r.solution_id
JOIN sighting_before g ON g.problem_id = r.problem_id AND g.environment_id = r.environment_id
WHERE g.outcome = CASE s.covers WHEN 'exact' THEN 'exact' ELSE 'padded' END
    AND g.graph = (s.mode = 'graph')
    AND g.hour >= s.published_us / 3600000000
    AND s.generation IS NOT s.retired_generation
    AND (s.retired_us IS NULL OR g.hour <= s.retired_us / 3600000000)
    AND NOT EXISTS (
        SELECT 1 FROM solution l
        JOIN environment_stamp la ON la.environment_id = g.environment_id AND la.backend = l.backend AND la.stamp = l.stamp
        WHERE l.problem_id = s.problem_id AND l.id > s.id AND l.device_id = s.device_id
            AND l.covers = s.covers AND l.mode = s.mode AND l.generation IS NOT l.retired_generation
            AND l.published_us / 3600000000 <= g.hour
            AND (l.retired_us IS NULL OR g.hour <= l.retired_us / 3600000000))
-- next
CREATE TABLE phase_call (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    phase TEXT NOT NULL CHECK (length(phase) BETWEEN 1 AND 60),
    hour INTEGER NOT NULL,                                  -- since 1970, UTC
    calls INTEGER NOT NULL CHECK (calls > 0),
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (hour, phase, problem_id, environment_id, run_id)
) STRICT, WITHOUT ROWID
-- next
CREATE TRIGGER environment_stamp_of_0_1_0 BEFORE INSERT ON environment_stamp WHEN NEW.kernel IS NULL
BEGIN
    SELECT raise(ABORT, 'a newer gemmtuned has brought this database up to date: upgrade gemmtuned here too, and restart');
END
-- next
CREATE VIEW untuned AS
SELECT *,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, u.calls, u.calls * c.us AS est_time_us,
    0.3 * c.us * (
        u.recent / (1 << min(max(CAST(strftime('%s', 'now') AS INTEGER) / 86400 - u.recent_day, 0), 62))
        + CASE WHEN EXISTS (SELECT 1 FROM sighting_before) THEN coalesce((
            SELECT sum(1.0 * s.calls / (1 << min(max((CAST(strftime('%s', 'now') AS INTEGER) / 3600 - s.hour) / 24, 0), 40)))
            FROM sighting_before s WHERE s.problem_id = u.problem_id AND s.environment_id = u.environment_id), 0) ELSE 0 END
    ) AS worth,
    0.3 * u.calls * c.us AS est_saving_us,
    CASE WHEN NOT u.tunable THEN 'untunable' WHEN w.state = 'failed' THEN 'failed'
        WHEN w.owner IS NOT NULL AND w.lease_until_us > CAST(strftime('%s', 'now') AS INTEGER) * 1000000 THEN 'leased'
        WHEN u.asked_us IS NULL AND u.last_seen_us < (CAST(strftime('%s', 'now') AS INTEGER) - 604800) * 1000000 THEN 'stale'
        ELSE 'queued' END AS state,
    u.last_seen_us AS last_seen, u.covers, u.unit_m, coalesce(w.attempts, 0) AS attempts, coalesce(w.reason, '') AS reason,
    coalesce(w.cause, '') AS cause, w.owner, e.key AS environment
FROM unit u
JOIN problem_cost c ON c.environment_id = u.environment_id AND c.problem_id = u.problem_id
JOIN problem p ON p.id = u.problem_id
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id AND w.covers = u.covers AND w.mode = 'eager'
WHERE u.solution_id IS NULL
)
-- next
CREATE VIEW trials AS
SELECT *,
    datetime(started / 1000000, 'unixepoch') AS started_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, t.mode, t.backend, t.config, t.phase, t.us, t.err, t.outcome, t.note, t.started_us AS started, t.owner,
    e.key AS environment, t.stamp
FROM trial t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
)
-- next
CREATE VIEW compiled AS
SELECT *,
    datetime(first_seen / 1000000, 'unixepoch') AS first_seen_at,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, c.kernel, c.first_seen_us AS first_seen, c.last_seen_us AS last_seen
FROM compiled_gemm c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id
)
-- next
CREATE VIEW hints AS
SELECT *,
    datetime(imported / 1000000, 'unixepoch') AS imported_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.kind, h.backend, h.config, h.arch, h.units, h.us, h.format, h.family AS table_family, h.source, h.line,
    h.text AS row, h.imported_us AS imported
FROM hint h LEFT JOIN problem p ON p.id = h.problem_id
)
-- next
CREATE VIEW phases AS
SELECT *,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT c.phase, p.text AS problem, h.key AS device, r.name AS run, sum(c.calls) AS calls,
    max(c.last_seen_us) AS last_seen
FROM phase_call c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY c.phase, c.problem_id, h.id, r.id
)
-- next
CREATE TABLE fleet (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    url TEXT NOT NULL CHECK (length(url) <= 4096),          -- where results are shared; another one begins from nothing
    live_until_us INTEGER NOT NULL,                         -- until then only what is claimed is leased; 0: nobody claims
    seen_us INTEGER NOT NULL                                -- when our counts were written there last
) STRICT
-- next
CREATE TABLE fleet_position (
    environment_id INTEGER PRIMARY KEY REFERENCES environment,
    after TEXT NOT NULL,                                    -- names of results up to here are known
    full_us INTEGER NOT NULL,                               -- when all names were listed last
    asked_us INTEGER                                        -- since when our worker has too little claimed; NULL: it has enough
) STRICT
-- next
CREATE TABLE fleet_claim (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    covers TEXT NOT NULL,
    ours INTEGER NOT NULL CHECK (ours IN (0, 1)),
    path TEXT NOT NULL CHECK (length(path) <= 1024),
    until_us INTEGER NOT NULL,                              -- 0: about to be claimed, not known whether it was won
    PRIMARY KEY (problem_id, environment_id, covers)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE fleet_listed (
    environment_id INTEGER NOT NULL REFERENCES environment,
    unit TEXT NOT NULL CHECK (length(unit) <= 64),
    path TEXT NOT NULL CHECK (length(path) <= 1024),
    PRIMARY KEY (environment_id, unit, path)
) STRICT, WITHOUT ROWID
-- next
CREATE TABLE fleet_result (
    path TEXT PRIMARY KEY CHECK (length(path) <= 1024),
    problem_id INTEGER REFERENCES problem,                  -- NULL: it could not be read
    environment_id INTEGER REFERENCES environment,
    covers TEXT,
    host TEXT NOT NULL CHECK (length(host) <= 200),
    state TEXT NOT NULL CHECK (state IN ('waiting', 'used', 'refused')),
    reason TEXT NOT NULL CHECK (length(reason) <= 4096),
    text TEXT NOT NULL CHECK (length(text) <= 65536),       -- the solutions, as JSON
    seen_us INTEGER NOT NULL
) STRICT
-- next
CREATE INDEX fleet_result_by_unit ON fleet_result (problem_id, environment_id, covers)
-- next
CREATE TABLE fleet_shared (
    solution_id INTEGER PRIMARY KEY REFERENCES solution
) STRICT
-- next
CREATE VIEW sessions AS
SELECT *,
    datetime(nullif(active_us, 0) / 1000000, 'unixepoch') AS active_at,
    datetime(started / 1000000, 'unixepoch') AS started_at,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at,
    datetime(ended / 1000000, 'unixepoch') AS ended_at
FROM (
SELECT host, pid, run, path, generation, active_us, calls, dropped, errors, reload_failures, note,
    CASE WHEN ended_us IS NOT NULL THEN 'ended'
        WHEN beat_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 30) * 1000000 THEN 'live'
        ELSE 'silent' END AS state,
    started_us AS started, beat_us AS last_seen, ended_us AS ended, sqlite_version, store_dev, store_ino, rank, namespace,
    role, operators, waited_us
FROM session
)
-- next
CREATE INDEX demand_wanted ON demand (wanted_of) WHERE wanted <> ''
-- next
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
)
-- next
CREATE VIEW problem_cost AS
SELECT c.problem_id, c.environment_id, c.solution_id, c.waits,
    CASE WHEN s.others > 0.15 AND c.sampled_calls >= 4 THEN c.sampled_us
        ELSE coalesce(s.baseline_us, c.sampled_us, c.roofline_us) END AS us,
    s.baseline_us AS measured_us, c.sampled_us, c.roofline_us
FROM (
    SELECT d.problem_id, d.environment_id, d.solution_id,
        d.wanted <> '' AND d.wanted_of IS d.solution_id AND d.solution_id IS NOT NULL AS waits,
        coalesce(
            (SELECT s.id FROM solution s
                WHERE s.problem_id = d.problem_id AND s.environment_id = d.environment_id
                ORDER BY s.generation DESC LIMIT 1),
            d.solution_id
        ) AS measured_id,
        d.sampled_calls, d.sampled_us / nullif(d.sampled_calls, 0) AS sampled_us,
        p.flops / r.flops_per_us + p.bytes / r.bytes_per_us + r.call_us AS roofline_us
    FROM demand d
    JOIN problem p ON p.id = d.problem_id
    JOIN environment e ON e.id = d.environment_id
    JOIN device h ON h.id = e.device_id
    JOIN roofline r ON r.kind = CASE WHEN h.kind IN ('cuda', 'rocm') THEN h.kind ELSE 'cpu' END
) c
LEFT JOIN solution s ON s.id = c.measured_id
-- next
CREATE VIEW traffic AS
WITH cost AS MATERIALIZED (  -- once for each problem, not for each row
    SELECT c.problem_id, c.environment_id, c.us, c.waits, s.id AS solution_id, s.backend, s.config, s.covers, s.generation,
        CASE WHEN s.id IS NULL THEN 'none' WHEN s.state = 'default_best' THEN 'best' ELSE 'faster' END AS answer,
        s.baseline_us / s.us AS gain
    FROM problem_cost c LEFT JOIN solution s ON s.id = c.solution_id
)
SELECT g.hour * 3600000000 AS hour, datetime(g.hour * 3600, 'unixepoch') AS hour_at, r.name AS run, p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, g.outcome, g.graph, g.calls, g.calls * p.flops AS flops, g.calls * c.us AS time_us,
    g.calls * c.us / CASE WHEN c.waits AND g.outcome = 'miss' THEN 1.0 ELSE coalesce(c.gain, 1.0) END AS now_us,
    CASE WHEN c.waits AND g.outcome = 'miss' THEN 'none' ELSE c.answer END AS answer,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.backend END AS backend,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.config END AS config,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.covers END AS covers,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.gain END AS gain,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.generation END AS generation,
    g.last_seen_us AS last_seen, datetime(g.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM every_sighting g
JOIN cost c ON c.environment_id = g.environment_id AND c.problem_id = g.problem_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id
-- next
CREATE VIEW coverage AS
SELECT *,
    round(100.0 * covered_time_us / nullif(time_us, 0), 1) AS covered_percent,
    round(100.0 * covered_calls / nullif(calls, 0), 1) AS covered_calls_percent,
    round(100.0 * (exact_calls + padded_calls) / nullif(calls, 0), 1) AS hit_percent
FROM (
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls
    FROM every_sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (  -- else SQLite would look the cost up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unserved,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT p.family, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.tuned THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY p.family, h.id
)
-- next
CREATE VIEW coverage_by_run AS
SELECT *,
    round(100.0 * covered_time_us / nullif(time_us, 0), 1) AS covered_percent,
    round(100.0 * covered_calls / nullif(calls, 0), 1) AS covered_calls_percent,
    round(100.0 * (exact_calls + padded_calls) / nullif(calls, 0), 1) AS hit_percent,
    datetime(first_hour / 1000000, 'unixepoch') AS first_hour_at,
    datetime(last_hour / 1000000, 'unixepoch') AS last_hour_at
FROM (
WITH recent AS (
    SELECT problem_id, environment_id, run_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls,
        sum(calls * graph) AS graph_calls,
        min(hour) AS first_hour, max(hour) AS last_hour
    FROM every_sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id, run_id
),
known AS MATERIALIZED (  -- else SQLite would look the cost up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unserved,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT r.name AS run, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.tuned THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN run r ON r.id = t.run_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.run_id, h.id
)
-- next
CREATE VIEW coverage_by_problem AS
SELECT *,
    round(100.0 * covered_time_us / nullif(time_us, 0), 1) AS covered_percent,
    round(100.0 * covered_calls / nullif(calls, 0), 1) AS covered_calls_percent,
    round(100.0 * (exact_calls + padded_calls) / nullif(calls, 0), 1) AS hit_percent,
    datetime(first_hour / 1000000, 'unixepoch') AS first_hour_at,
    datetime(last_hour / 1000000, 'unixepoch') AS last_hour_at
FROM (
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls,
        sum(calls * graph) AS graph_calls,
        min(hour) AS first_hour, max(hour) AS last_hour
    FROM every_sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (  -- else SQLite would look the cost up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unserved,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act, h.key AS device,
    1 AS problems,
    max(t.tuned) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.problem_id, h.id
)
-- next
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
    AND NOT (d.wanted NOT IN ('', 'operands') AND d.wanted_of = d.solution_id)
GROUP BY g.problem_id, g.environment_id, g.run_id
)
-- next
CREATE VIEW unraced AS
SELECT p.text AS problem, h.key AS device, trim(replace(' ' || d.wanted || ' ', ' operands ', ' ')) AS operators,
    s.backend, s.beside, d.calls, d.calls - d.exact_calls - d.padded_calls AS missed, d.last_seen_us AS last_seen,
    datetime(d.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM demand d
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id
JOIN device h ON h.id = e.device_id
WHERE d.wanted NOT IN ('', 'operands') AND d.wanted_of = d.solution_id
-- next
CREATE VIEW unfit AS
SELECT p.text AS problem, h.key AS device, s.backend, s.config, d.calls,
    d.calls - d.exact_calls - d.padded_calls AS missed, d.last_seen_us AS last_seen,
    datetime(d.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM demand d
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id
JOIN device h ON h.id = e.device_id
WHERE d.wanted_of = d.solution_id AND instr(' ' || d.wanted || ' ', ' operands ')
-- next
CREATE TRIGGER solution_covered AFTER INSERT ON solution WHEN NEW.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    WHERE hits_to IS NULL AND retired_generation IS NULL AND id < NEW.id AND environment_id <> NEW.environment_id
        AND problem_id = NEW.problem_id AND device_id = NEW.device_id AND covers = NEW.covers AND mode = NEW.mode
        AND NOT EXISTS (
            SELECT 1 FROM environment_stamp b JOIN environment e ON e.id = b.environment_id
            WHERE b.backend = solution.backend AND b.stamp = solution.stamp AND e.device_id = solution.device_id
                AND NOT EXISTS (
                SELECT 1 FROM environment_stamp a
                WHERE a.environment_id = b.environment_id AND a.backend = NEW.backend AND a.stamp = NEW.stamp));
END
-- next
CREATE TRIGGER solution_uncovered AFTER UPDATE OF retired_generation ON solution
WHEN NEW.retired_generation IS NOT NULL AND OLD.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = NULL, hits_from = coalesce(hits_from, 0) - hits_to
        + coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    WHERE hits_to IS NOT NULL AND retired_generation IS NULL AND id <> NEW.id
        AND problem_id = NEW.problem_id AND device_id = NEW.device_id AND covers = NEW.covers AND mode = NEW.mode
        AND NOT EXISTS (SELECT 1 FROM solution y WHERE y.retired_generation IS NULL AND y.id > solution.id
            AND y.problem_id = NEW.problem_id AND y.device_id = NEW.device_id AND y.covers = NEW.covers AND y.mode = NEW.mode
            AND NOT EXISTS (
            SELECT 1 FROM environment_stamp b JOIN environment e ON e.id = b.environment_id
            WHERE b.backend = solution.backend AND b.stamp = solution.stamp AND e.device_id = solution.device_id
                AND NOT EXISTS (
                SELECT 1 FROM environment_stamp a
                WHERE a.environment_id = b.environment_id AND a.backend = y.backend AND a.stamp = y.stamp)));
END
