-- 0023_fleet: what hosts that share their results know of each other (docs/fleet.md).
-- Before this every host tuned by itself, and ten hosts of one card tuned the same problems ten times.
CREATE TABLE fleet (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    url TEXT NOT NULL CHECK (length(url) <= 4096),          -- where results are shared; another one begins from nothing
    live_until_us INTEGER NOT NULL,                         -- until then only what is claimed is leased; 0: nobody claims
    seen_us INTEGER NOT NULL                                -- when our counts were written there last
) STRICT;
CREATE TABLE fleet_position (
    environment_id INTEGER PRIMARY KEY REFERENCES environment,
    after TEXT NOT NULL,                                    -- names of results up to here are known
    full_us INTEGER NOT NULL,                               -- when all names were listed last
    asked_us INTEGER                                        -- since when our worker has too little claimed; NULL: it has enough
) STRICT;
-- Units that somebody tunes now, by our own clock.
CREATE TABLE fleet_claim (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    covers TEXT NOT NULL,
    ours INTEGER NOT NULL CHECK (ours IN (0, 1)),
    path TEXT NOT NULL CHECK (length(path) <= 1024),
    until_us INTEGER NOT NULL,                              -- 0: about to be claimed, not known whether it was won
    PRIMARY KEY (problem_id, environment_id, covers)
) STRICT, WITHOUT ROWID;
-- Names of results that are there, by the unit's hash; what they hold is fetched once their problem is wanted here.
CREATE TABLE fleet_listed (
    environment_id INTEGER NOT NULL REFERENCES environment,
    unit TEXT NOT NULL CHECK (length(unit) <= 64),
    path TEXT NOT NULL CHECK (length(path) <= 1024),
    PRIMARY KEY (environment_id, unit, path)
) STRICT, WITHOUT ROWID;
-- Results of other hosts: waiting for a check of our own, in use after it, or refused; and names that are no results.
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
) STRICT;
CREATE INDEX fleet_result_by_unit ON fleet_result (problem_id, environment_id, covers);
-- Solutions that others have from us, or we from them.
CREATE TABLE fleet_shared (
    solution_id INTEGER PRIMARY KEY REFERENCES solution
) STRICT;
