-- 0009_ingest: counts that programs of other users left in the home's ingest file.
-- Before this, all programs of one home had to run as the daemon's user, since they wrote to the daemon's own database.
CREATE TABLE taken (
    source TEXT NOT NULL CHECK (length(source) <= 200),     -- which file: device and inode
    sighting TEXT NOT NULL CHECK (length(sighting) <= 64),  -- hash of a sighting's key there
    calls INTEGER NOT NULL,                                 -- so much of it is in our own tables already
    sampled_calls INTEGER NOT NULL,
    sampled_us REAL NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (source, sighting)
) STRICT, WITHOUT ROWID;
