-- 0017_identity: demand belongs to a device and a torch, stamps to a kernel.
-- Before this, editing one kernel retired the solutions by all others, and a backend more in the daemon's Python than in
-- a program's made every problem of that program "not ours to tune". Environments of one device and torch become one:
-- counts add up, the newest verdicts on what failed stay, and every solution goes on holding where it held.
DROP TRIGGER demand_came;
DROP TRIGGER solution_came;
DROP TRIGGER solution_went;
DROP VIEW frozen;
DROP VIEW hints;
DROP VIEW compiled;
DROP VIEW trials;
DROP VIEW solutions;
DROP VIEW hits_before;
DROP VIEW untuned;
DROP VIEW coverage_by_problem;
DROP VIEW coverage_by_run;
DROP VIEW coverage;
DROP VIEW unit;
DROP VIEW look_up;

-- Hits that are counted already, before environments become one
CREATE TABLE had AS SELECT s.id, CASE WHEN s.retired_generation IS NOT NULL THEN coalesce(s.hits_to - coalesce(s.hits_from, 0), 0)
    ELSE coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = s.id), 0) - coalesce(s.hits_from, 0) END AS hits
FROM solution s;
DROP VIEW reach;

-- Each kernel's own hash where 0.1.0 had one of all: configs/old_stamps.py has the same list
CREATE TABLE was (backend TEXT, kernel TEXT, of_all TEXT, own TEXT) STRICT;
INSERT INTO was VALUES
    ('triton', 'fragments', 'f64e03e6295b', 'e01ad9bc2e69'), ('triton', 'gemv', 'f64e03e6295b', 'fec7791c4bcf'),
    ('triton', 'selected', 'f64e03e6295b', '4a3ae267f00c'), ('triton', 'tiles', 'f64e03e6295b', '7bd927ca6285'),
    ('triton', 'warp_split_k', 'f64e03e6295b', 'feabeb54b0c5'), ('cuda', 'one_shot', '6813ed7ea8aa', '6813ed7ea8aa');
CREATE TABLE told (id INTEGER PRIMARY KEY, kind TEXT, environment_id INTEGER, backend TEXT, kernel TEXT, stamp TEXT) STRICT;
INSERT INTO told (id, kind, environment_id, backend, kernel, stamp)
    SELECT id, 'solution', environment_id, backend, coalesce(json_extract(config, '$.kernel'), ''), stamp FROM solution
    WHERE backend IN ('triton', 'cuda') AND json_valid(config);
UPDATE solution SET stamp = (SELECT t.kernel || '/' || coalesce(
        (SELECT replace(t.stamp, '/' || w.of_all, '/' || w.own) FROM was w
            WHERE w.backend = t.backend AND w.kernel = t.kernel), t.stamp)
    FROM told t WHERE t.id = solution.id)
WHERE id IN (SELECT id FROM told WHERE kernel <> '');
UPDATE quarantine SET stamp = json_extract(config, '$.kernel') || '/' || coalesce(
        (SELECT replace(quarantine.stamp, '/' || w.of_all, '/' || w.own) FROM was w
            WHERE w.backend = quarantine.backend AND w.kernel = json_extract(config, '$.kernel')), stamp)
WHERE backend IN ('triton', 'cuda') AND json_valid(config) AND json_extract(config, '$.kernel') IS NOT NULL;

-- The stamp that a trial was made under stands in its own row
ALTER TABLE trial ADD COLUMN stamp TEXT NOT NULL DEFAULT '' CHECK (length(stamp) <= 4096);
UPDATE trial SET stamp = coalesce((SELECT a.stamp FROM environment_stamp a
    WHERE a.environment_id = trial.environment_id AND a.backend = trial.backend), '');
UPDATE trial SET stamp = json_extract(config, '$.kernel') || '/' || coalesce(
        (SELECT replace(trial.stamp, '/' || w.of_all, '/' || w.own) FROM was w
            WHERE w.backend = trial.backend AND w.kernel = json_extract(config, '$.kernel')), stamp)
WHERE stamp <> '' AND backend IN ('triton', 'cuda') AND json_valid(config) AND json_extract(config, '$.kernel') IS NOT NULL;

-- One environment of those of a device and torch: the first keeps its number, the newest says what holds now
CREATE TABLE moved (old INTEGER PRIMARY KEY, new INTEGER NOT NULL, newest INTEGER NOT NULL, torch TEXT NOT NULL) STRICT;
INSERT INTO moved
    SELECT e.id, min(e.id) OVER same, max(e.id) OVER same, coalesce(t.stamp, '') FROM environment e
    LEFT JOIN environment_stamp t ON t.environment_id = e.id AND t.backend = 'torch'
    WINDOW same AS (PARTITION BY e.device_id, coalesce(t.stamp, ''));
CREATE TABLE stamp_before AS SELECT environment_id, backend, stamp FROM environment_stamp;
DROP TABLE environment_stamp;
-- Every stamp that was seen in an environment, for counting its hits; current = 1: solutions of this one hold there now,
-- as the daemon that leased last said, or before any did the first program.
CREATE TABLE environment_stamp (
    environment_id INTEGER NOT NULL REFERENCES environment,
    backend TEXT NOT NULL,
    kernel TEXT NOT NULL,                                   -- '' for a backend that has one stamp
    stamp TEXT NOT NULL,
    current INTEGER NOT NULL CHECK (current IN (0, 1)),
    PRIMARY KEY (environment_id, backend, kernel, stamp)
) STRICT, WITHOUT ROWID;
INSERT INTO environment_stamp
    SELECT m.new, a.backend, coalesce(w.kernel, ''),
        coalesce(w.kernel || '/' || replace(a.stamp, '/' || w.of_all, '/' || w.own), a.stamp), max(m.old = m.newest)
    FROM stamp_before a JOIN moved m ON m.old = a.environment_id LEFT JOIN was w ON w.backend = a.backend
    GROUP BY 1, 2, 3, 4;
-- CROSS JOIN: in this order, so that millions of rows are not gone through where no environment moves.
INSERT INTO sighting (problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us)
    SELECT problem_id, m.new, run_id, hour, outcome, graph, sum(calls), sum(sampled_calls), sum(sampled_us), max(last_seen_us)
    FROM moved m CROSS JOIN sighting ON environment_id = m.old WHERE m.old <> m.new GROUP BY 1, 2, 3, 4, 5, 6
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, sampled_calls = sampled_calls + excluded.sampled_calls,
    sampled_us = sampled_us + excluded.sampled_us, last_seen_us = max(last_seen_us, excluded.last_seen_us);
DELETE FROM sighting WHERE environment_id IN (SELECT old FROM moved WHERE old <> new);
INSERT INTO sighting_before (problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us,
        last_seen_us)
    SELECT problem_id, m.new, run_id, hour, outcome, graph, sum(calls), sum(sampled_calls), sum(sampled_us), max(last_seen_us)
    FROM moved m CROSS JOIN sighting_before ON environment_id = m.old WHERE m.old <> m.new GROUP BY 1, 2, 3, 4, 5, 6
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, sampled_calls = sampled_calls + excluded.sampled_calls,
    sampled_us = sampled_us + excluded.sampled_us, last_seen_us = max(last_seen_us, excluded.last_seen_us);
-- By their keys, for the same reason
DELETE FROM sighting_before WHERE (problem_id, environment_id, run_id, hour, outcome, graph) IN (
    SELECT problem_id, environment_id, run_id, hour, outcome, graph
    FROM moved m CROSS JOIN sighting_before ON environment_id = m.old WHERE m.old <> m.new);
INSERT INTO demand (problem_id, environment_id, calls, sampled_calls, sampled_us, first_seen_us, last_seen_us, asked_us, recent,
        recent_day, exact_calls, padded_calls, exact_graph_calls, padded_graph_calls)
    SELECT problem_id, m.new, calls, sampled_calls, sampled_us, first_seen_us, last_seen_us, asked_us, recent,
        recent_day, exact_calls, padded_calls, exact_graph_calls, padded_graph_calls
    FROM demand JOIN moved m ON m.old = environment_id WHERE m.old <> m.new
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, sampled_calls = sampled_calls + excluded.sampled_calls,
    sampled_us = sampled_us + excluded.sampled_us, first_seen_us = min(first_seen_us, excluded.first_seen_us),
    last_seen_us = max(last_seen_us, excluded.last_seen_us), asked_us = coalesce(asked_us, excluded.asked_us),
    recent = recent / (1 << min(max(excluded.recent_day - recent_day, 0), 62))
        + excluded.recent / (1 << min(max(recent_day - excluded.recent_day, 0), 62)),
    recent_day = max(recent_day, excluded.recent_day),
    exact_calls = exact_calls + excluded.exact_calls, padded_calls = padded_calls + excluded.padded_calls,
    exact_graph_calls = exact_graph_calls + excluded.exact_graph_calls,
    padded_graph_calls = padded_graph_calls + excluded.padded_graph_calls;
DELETE FROM demand WHERE environment_id IN (SELECT old FROM moved WHERE old <> new);
INSERT INTO compiled_gemm
    SELECT problem_id, m.new, run_id, kernel, min(first_seen_us), max(last_seen_us)
    FROM compiled_gemm JOIN moved m ON m.old = environment_id WHERE m.old <> m.new GROUP BY 1, 2, 3, 4
ON CONFLICT DO UPDATE SET first_seen_us = min(first_seen_us, excluded.first_seen_us),
    last_seen_us = max(last_seen_us, excluded.last_seen_us);
DELETE FROM compiled_gemm WHERE environment_id IN (SELECT old FROM moved WHERE old <> new);
-- Of several rows the newest stays
DELETE FROM work WHERE EXISTS (
    SELECT 1 FROM work o JOIN moved n ON n.old = o.environment_id JOIN moved m ON m.old = work.environment_id
    WHERE n.new = m.new AND o.problem_id = work.problem_id AND o.covers = work.covers AND o.mode = work.mode
        AND (o.leased_us, o.environment_id) > (work.leased_us, work.environment_id));
UPDATE work SET environment_id = (SELECT new FROM moved WHERE old = environment_id);
DELETE FROM trial WHERE EXISTS (
    SELECT 1 FROM trial o JOIN moved n ON n.old = o.environment_id JOIN moved m ON m.old = trial.environment_id
    WHERE n.new = m.new AND o.problem_id = trial.problem_id AND o.mode = trial.mode AND o.backend = trial.backend
        AND o.config = trial.config AND o.phase = trial.phase
        AND (o.started_us, o.id) > (trial.started_us, trial.id));
UPDATE trial SET environment_id = (SELECT new FROM moved WHERE old = environment_id);
UPDATE solution SET environment_id = (SELECT new FROM moved WHERE old = environment_id);
DELETE FROM environment WHERE id IN (SELECT old FROM moved WHERE old <> new);
-- A members' file is known by its first environment as it was called when it came (db/members_file.py)
ALTER TABLE environment ADD COLUMN came_as TEXT NOT NULL DEFAULT '';
UPDATE environment SET came_as = key;
UPDATE environment SET key = (SELECT h.key || ' torch=' || m.torch FROM device h JOIN moved m ON m.old = environment.id
    WHERE h.id = environment.device_id);
DROP TABLE moved;
DROP TABLE told;
DROP TABLE was;
DROP TABLE stamp_before;

-- What the daemon's worker said that it can tune; nothing is known of an environment without a row
CREATE TABLE tunable (
    environment_id INTEGER NOT NULL REFERENCES environment,
    operands TEXT NOT NULL CHECK (length(operands) <= 200), -- problem.operands
    PRIMARY KEY (environment_id, operands)
) STRICT, WITHOUT ROWID;
ALTER TABLE demand ADD COLUMN tunable INTEGER NOT NULL DEFAULT 1 CHECK (tunable IN (0, 1)); -- kept as solution_id is

-- The live solution that the look-up finds for a problem in an environment: exact M, then fine, then coarse; NULL is a miss.
-- demand.solution_id is its answer, kept.
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
JOIN environment e ON e.id = d.environment_id;

-- A solution, and every problem in every environment that it may serve. CROSS JOIN: in this order, from the solution on;
-- SQLite would go through all of demand.
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
CROSS JOIN demand d ON d.environment_id = e.id AND d.problem_id = q.id;

CREATE TRIGGER demand_came AFTER INSERT ON demand BEGIN
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
            WHERE l.problem_id = NEW.problem_id AND l.environment_id = NEW.environment_id),
        tunable = NOT EXISTS (SELECT 1 FROM tunable t WHERE t.environment_id = NEW.environment_id)
            OR EXISTS (SELECT 1 FROM tunable t JOIN problem p ON p.operands = t.operands
                WHERE t.environment_id = NEW.environment_id AND p.id = NEW.problem_id)
    WHERE problem_id = NEW.problem_id AND environment_id = NEW.environment_id;
END;
-- One that comes beside another of the same environment (of another stamp) has the hits from now on
CREATE TRIGGER solution_came AFTER INSERT ON solution BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    WHERE NEW.retired_generation IS NULL AND hits_to IS NULL AND retired_generation IS NULL AND id < NEW.id
        AND problem_id = NEW.problem_id AND environment_id = NEW.environment_id AND covers = NEW.covers AND mode = NEW.mode;
    UPDATE solution SET hits_from = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = NEW.id), 0)
    WHERE id = NEW.id AND hits_from IS NULL;
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
        WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
    WHERE (environment_id, problem_id) IN (SELECT r.environment_id, r.problem_id FROM reach r WHERE r.solution_id = NEW.id);
END;
CREATE TRIGGER solution_went AFTER UPDATE OF retired_generation ON solution
WHEN NEW.retired_generation IS NOT NULL AND OLD.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = NEW.id), 0)
    WHERE id = NEW.id AND hits_to IS NULL;
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
        WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
    WHERE (environment_id, problem_id) IN (SELECT r.environment_id, r.problem_id FROM reach r WHERE r.solution_id = NEW.id);
END;

UPDATE solution SET hits_from = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    - (SELECT h.hits FROM had h WHERE h.id = solution.id) WHERE retired_generation IS NULL;
UPDATE solution SET hits_to = hits_from + (SELECT h.hits FROM had h WHERE h.id = solution.id)
WHERE retired_generation IS NULL AND EXISTS (
    SELECT 1 FROM solution l WHERE l.id > solution.id AND l.retired_generation IS NULL AND l.problem_id = solution.problem_id
        AND l.environment_id = solution.environment_id AND l.covers = solution.covers AND l.mode = solution.mode);
DROP TABLE had;
UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
    WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id);
-- 0.1.0 failed for good what it had no family for: that is not held against it
DELETE FROM work WHERE state = 'failed' AND cause = 'failed' AND reason LIKE '%cannot be tuned yet%';

-- What each problem is tuned as: itself, or its fine bucket once more than three sizes of that were seen here or asked for.
-- unit_id: the same for problems that are tuned together. What a call costs is in problem_cost, to be joined by key.
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
) b ON b.environment_id = d.environment_id AND b.rest = p.rest AND b.m_fine = p.m_fine;

CREATE VIEW coverage AS
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered, c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT p.family, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.covered THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY p.family, h.id;

CREATE VIEW coverage_by_run AS
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered, c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT r.name AS run, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.covered THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN run r ON r.id = t.run_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.run_id, h.id;

CREATE VIEW coverage_by_problem AS
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered, c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.threads, p.experts, p.topk, p."inter", p.act, h.key AS device,
    1 AS problems,
    max(t.covered) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.problem_id, h.id;

-- worth: calls of today (UTC) count once, those of yesterday half, and so on; times the time a call, times the share we
-- expect to save (0.3 until trials tell more). calls and est_time_us are of all time. stale: not called for seven days,
-- and nobody asked for it: it waits for nobody until it is called again.
-- untunable: the version of the daemon there has no family for it.
CREATE VIEW untuned AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.threads, p.experts, p.topk, p."inter", p.act,
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
WHERE u.solution_id IS NULL;

-- Hits in rows that are not brought over yet, by solution: those of an hour are the newest one's that served the same calls in
-- it. Rows that were retired as they came have none.
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
            AND (l.retired_us IS NULL OR g.hour <= l.retired_us / 3600000000));

-- hit_calls: calls that were hits of this solution when they were made; what they save is the measured share of what a
-- call costs in programs.
CREATE VIEW solutions AS
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, wscale, scale_dtype, wscale_dtype,
    scale_layout, wscale_layout, layout, weight_state, packing, math_mode, deterministic, threads, experts, topk, "inter", act,
    device, mode, covers, backend, config, us, baseline_us, speedup,
    hit_calls * (baseline_us - us) * price AS saved_us, hit_calls,
    gain_low, err, baseline_err, tflops, gb_s, environment, stamp, generation, state, published, retired, reason, others, recheck
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
        s.reason, s.others, s.recheck
    FROM solution s
    JOIN problem p ON p.id = s.problem_id
    JOIN device h ON h.id = s.device_id
    JOIN environment e ON e.id = s.environment_id
);

CREATE VIEW trials AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, t.mode, t.backend, t.config, t.phase, t.us, t.err, t.outcome, t.note, t.started_us AS started, t.owner,
    e.key AS environment, t.stamp
FROM trial t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id;

CREATE VIEW compiled AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, c.kernel, c.first_seen_us AS first_seen, c.last_seen_us AS last_seen
FROM compiled_gemm c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id;

CREATE VIEW hints AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.threads, p.experts, p.topk, p."inter", p.act,
    h.kind, h.backend, h.config, h.arch, h.units, h.us, h.format, h.family AS table_family, h.source, h.line,
    h.text AS row, h.imported_us AS imported
FROM hint h LEFT JOIN problem p ON p.id = h.problem_id;

-- Tuned, but frozen in a captured graph: ten seconds after a publish no graph is captured with the old table any more.
CREATE VIEW frozen AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.threads, p.experts, p.topk, p."inter", p.act,
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
GROUP BY g.problem_id, g.environment_id, g.run_id;
