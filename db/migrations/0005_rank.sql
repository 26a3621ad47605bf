-- 0005_rank: which rank of a program a hooked process is.
-- Before this, the ranks of one run could not be told apart, nor whether they hold the same table.
ALTER TABLE session ADD COLUMN rank INTEGER;                 -- of torch.distributed or the launcher; NULL: not one of several

DROP VIEW sessions;
CREATE VIEW sessions AS
SELECT host, pid, run, path, generation, active_us, calls, dropped, errors, reload_failures, note,
    CASE WHEN ended_us IS NOT NULL THEN 'ended'
        WHEN beat_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 30) * 1000000 THEN 'live'
        ELSE 'silent' END AS state,
    started_us AS started, beat_us AS last_seen, ended_us AS ended, sqlite_version, store_dev, store_ino, rank
FROM session;
