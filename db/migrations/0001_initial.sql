-- 0001_initial: what programs saw, what the daemon tried, what was chosen.
-- Instants are integer UTC microseconds (_us), hours are whole hours since 1970 UTC, durations REAL microseconds (_us).

-- The key of everything: one row for each distinct problem, seen or filed under (a padded M is a row too).
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
    bytes REAL NOT NULL,
    UNIQUE (rest, m)
) STRICT;

CREATE TABLE device (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE CHECK (length(key) <= 512),
    kind TEXT NOT NULL,                                     -- cpu, cuda, rocm
    name TEXT NOT NULL,
    arch TEXT NOT NULL,
    units INTEGER NOT NULL
) STRICT;

-- Time of a call nobody has measured: flops/rate + bytes/rate + call_us. Coarse on purpose; it only orders the queue.
CREATE TABLE roofline (
    kind TEXT PRIMARY KEY,
    flops_per_us REAL NOT NULL,
    bytes_per_us REAL NOT NULL,
    call_us REAL NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO roofline VALUES ('cpu', 50e3, 10e3, 0), ('cuda', 100e6, 1.5e6, 4), ('rocm', 100e6, 1.5e6, 4);

CREATE TABLE environment (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE CHECK (length(key) <= 8192),   -- Environment.key
    device_id INTEGER NOT NULL REFERENCES device,
    first_seen_us INTEGER NOT NULL
) STRICT;

-- What must be equal for a backend's solutions to hold in this environment.
CREATE TABLE environment_stamp (
    environment_id INTEGER NOT NULL REFERENCES environment,
    backend TEXT NOT NULL,
    stamp TEXT NOT NULL,
    PRIMARY KEY (environment_id, backend)
) STRICT, WITHOUT ROWID;

CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(name) <= 512)
) STRICT;

-- How often a run called a problem, by hour and by what its look-up gave. Old hours are rolled up into days.
CREATE TABLE sighting (
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
) STRICT, WITHOUT ROWID;
CREATE INDEX sighting_by_hour ON sighting (hour);

-- One row for each problem in each environment: what is asked for. Written in the same transaction as `sighting`,
-- so sum(sighting.calls) = calls always: `gemmtuned db check` compares them.
-- calls = 0: nobody called it, somebody asked for it to be tuned. sampled_*: misses only, so it is the default's time.
CREATE TABLE demand (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    calls INTEGER NOT NULL CHECK (calls >= 0),
    sampled_calls INTEGER NOT NULL CHECK (sampled_calls >= 0),
    sampled_us REAL NOT NULL,
    first_seen_us INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (environment_id, problem_id)
) STRICT, WITHOUT ROWID;

-- A unit of tuning that somebody holds, that waits after a failure, or that failed for good in this environment.
-- No row: nobody ever held it, or it has its verdict. attempts rises at each lease and is its fencing token.
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
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (problem_id, environment_id, covers, mode)
) STRICT, WITHOUT ROWID;

-- One run of one candidate; the newest of its kind is kept.
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
    started_us INTEGER NOT NULL,
    UNIQUE (problem_id, environment_id, mode, backend, config, phase)
) STRICT;

-- Each time what is published changes, by one.
CREATE TABLE publication (
    generation INTEGER PRIMARY KEY,
    published_us INTEGER NOT NULL,
    installed INTEGER NOT NULL,
    retired INTEGER NOT NULL,
    note TEXT NOT NULL
) STRICT;

-- Verdicts, never deleted: a row lives from `generation` until `retired_generation`, so any past publication can be named.
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
    reason TEXT NOT NULL DEFAULT '',                        -- why it was retired
    CHECK ((retired_generation IS NULL) = (state IN ('published', 'default_best', 'pinned')))
) STRICT;
CREATE INDEX solution_by_problem ON solution (problem_id, environment_id, generation);
CREATE UNIQUE INDEX solution_live ON solution (problem_id, device_id, covers, mode, backend, stamp)
    WHERE retired_generation IS NULL;

-- A route that failed inside a program; the daemon withdraws it. taken_us is NULL until the daemon has looked.
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
    taken_us INTEGER,
    UNIQUE (problem_id, device, mode, covers, backend, config, stamp)
) STRICT;

-- One hooked process. store_dev, store_ino: the file it writes to; another than the daemon's means two containers
-- that believe they share a database and do not.
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
    ended_us INTEGER,
    PRIMARY KEY (host, pid, started_us)
) STRICT, WITHOUT ROWID;
