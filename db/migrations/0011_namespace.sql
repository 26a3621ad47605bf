-- 0011_namespace: where a process number means something.
-- Before this, a program killed by SIGKILL was shown live for 30 s: containers may share host name and home, so a
-- number that is not there said nothing.
ALTER TABLE session ADD COLUMN namespace TEXT CHECK (length(namespace) <= 100);  -- boot and PID namespace; NULL: not known

DROP VIEW sessions;
CREATE VIEW sessions AS
SELECT host, pid, run, path, generation, active_us, calls, dropped, errors, reload_failures, note,
    CASE WHEN ended_us IS NOT NULL THEN 'ended'
        WHEN beat_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 30) * 1000000 THEN 'live'
        ELSE 'silent' END AS state,
    started_us AS started, beat_us AS last_seen, ended_us AS ended, sqlite_version, store_dev, store_ino, rank, namespace
FROM session;
