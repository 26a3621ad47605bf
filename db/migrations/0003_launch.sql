-- 0003_launch: a solution that is a compiled kernel carries how to launch it.
-- Before this, only backends that every program can run by itself could be published.
ALTER TABLE solution ADD COLUMN launch TEXT NOT NULL DEFAULT ''
    CHECK (length(launch) <= 4096);                         -- JSON of configs/launch.py; '' for backends without binaries
