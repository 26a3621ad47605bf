-- 0027_waited: how much longer a hooked process ran because its threads waited for CPUs that others used.
-- Without it, eight workers on two CPUs looked as if their products were a small part of their time.
ALTER TABLE session ADD COLUMN waited_us INTEGER NOT NULL DEFAULT 0 CHECK (waited_us >= 0);

DROP VIEW sessions;
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
);
