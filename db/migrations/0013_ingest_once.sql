-- 0013_ingest_once: what was taken of the members' file is remembered by its own rows, for as long as that file is there.
-- Before this, rows were known by a hash that was forgotten after 16 days, and then counted again. `taken` is only read
-- until the file that is there at the upgrade has been gone through once; then it is empty for ever.
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
) STRICT;

-- So much of a row of that file is in our own tables already.
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
) STRICT, WITHOUT ROWID;

-- What members brought that was new to us, by UTC day: there is a limit a day.
CREATE TABLE ingest_new (
    day INTEGER NOT NULL,
    what TEXT NOT NULL CHECK (what IN ('problem', 'environment', 'run', 'session', 'report')),
    number INTEGER NOT NULL,
    PRIMARY KEY (day, what)
) STRICT, WITHOUT ROWID;
