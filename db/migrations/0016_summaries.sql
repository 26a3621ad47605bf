-- 0016_summaries: what every lease and report asks for is kept with the counts, in the same transaction.
-- Before this, a year of 10,000 problems was summed up anew at each lease (1.6 s), and a status took 1.5 s.
DROP VIEW coverage;
DROP VIEW coverage_by_run;
DROP VIEW coverage_by_problem;
DROP VIEW untuned;
DROP VIEW solutions;
DROP VIEW frozen;
DROP VIEW unit;
DROP VIEW problem_cost;
DROP VIEW verdict;

-- Hours first: what one hour brings lies together, so a flush writes few pages and a window of time is one range.
-- Hours become days, and days become blocks of four weeks (db/rollup.py); `hour` is the first hour of the row's time.
-- Rows of before are brought over in slices; it is empty in a database that began with this step.
ALTER TABLE sighting RENAME TO sighting_before;
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
) STRICT, WITHOUT ROWID;

CREATE VIEW every_sighting AS
SELECT problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us FROM sighting
UNION ALL
SELECT problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us
FROM sighting_before;

ALTER TABLE demand ADD COLUMN solution_id INTEGER;              -- what the look-up finds, NULL is a miss: kept by triggers
ALTER TABLE demand ADD COLUMN asked_us INTEGER;                 -- when somebody asked for it to be tuned; NULL: nobody did
ALTER TABLE demand ADD COLUMN recent REAL NOT NULL DEFAULT 0;   -- calls: those of recent_day once, of the day before half ...
ALTER TABLE demand ADD COLUMN recent_day INTEGER NOT NULL DEFAULT 0; -- days since 1970, UTC
ALTER TABLE demand ADD COLUMN exact_calls INTEGER NOT NULL DEFAULT 0; -- hits since this step, by what the solution covers
ALTER TABLE demand ADD COLUMN padded_calls INTEGER NOT NULL DEFAULT 0;
ALTER TABLE demand ADD COLUMN exact_graph_calls INTEGER NOT NULL DEFAULT 0;
ALTER TABLE demand ADD COLUMN padded_graph_calls INTEGER NOT NULL DEFAULT 0;
UPDATE demand SET asked_us = first_seen_us WHERE calls = 0;

-- Hits of a solution: those of its problems when it was retired, or now, less those when it came; and those of before.
ALTER TABLE solution ADD COLUMN hits_from INTEGER;
ALTER TABLE solution ADD COLUMN hits_to INTEGER;
ALTER TABLE solution ADD COLUMN hits_before INTEGER NOT NULL DEFAULT 0; -- out of rows of sighting_before that were brought over

-- The live solution that the look-up finds for a problem in an environment: exact M, then fine, then coarse; NULL is a miss.
-- demand.solution_id is its answer, kept.
CREATE VIEW look_up AS
SELECT d.problem_id, d.environment_id,
    coalesce(
        (SELECT s.id FROM solution s
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            WHERE s.problem_id = d.problem_id AND s.device_id = e.device_id AND s.covers = 'exact'
                AND s.retired_generation IS NULL
            ORDER BY s.generation DESC LIMIT 1),
        (SELECT s.id FROM problem b
            JOIN solution s ON s.problem_id = b.id AND s.device_id = e.device_id AND s.covers = 'fine'
                AND s.retired_generation IS NULL
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            WHERE b.rest = p.rest AND b.m = p.m_fine
            ORDER BY s.generation DESC LIMIT 1),
        (SELECT s.id FROM problem b
            JOIN solution s ON s.problem_id = b.id AND s.device_id = e.device_id AND s.covers = 'coarse'
                AND s.retired_generation IS NULL
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            WHERE b.rest = p.rest AND b.m = p.m_coarse
            ORDER BY s.generation DESC LIMIT 1)
    ) AS solution_id
FROM demand d
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id;
UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
    WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id);

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
        WHERE l.problem_id = NEW.problem_id AND l.environment_id = NEW.environment_id)
    WHERE problem_id = NEW.problem_id AND environment_id = NEW.environment_id;
END;
CREATE TRIGGER solution_came AFTER INSERT ON solution BEGIN
    UPDATE solution SET hits_from = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = NEW.id), 0)
    WHERE id = NEW.id AND hits_from IS NULL;
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
        WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
    WHERE (environment_id, problem_id) IN (SELECT r.environment_id, r.problem_id FROM reach r WHERE r.solution_id = NEW.id);
END;
CREATE TRIGGER solution_went AFTER UPDATE OF retired_generation ON solution
WHEN NEW.retired_generation IS NOT NULL AND OLD.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = NEW.id), 0)
    WHERE id = NEW.id;
    UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
        WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
    WHERE (environment_id, problem_id) IN (SELECT r.environment_id, r.problem_id FROM reach r WHERE r.solution_id = NEW.id);
END;

-- Microseconds a call by the default: measured when it was tuned (in this environment, else by the solution in use), else the
-- mean of calls timed on the way, else the roofline. One number whether covered or not, so that coverage by time is a share.
-- Times taken beside a busy program (0.15 is CROWDED of configs/solution.py) give way to the programs' own calls.
CREATE VIEW problem_cost AS
SELECT c.problem_id, c.environment_id, c.solution_id,
    CASE WHEN s.others > 0.15 AND c.sampled_calls >= 4 THEN c.sampled_us
        ELSE coalesce(s.baseline_us, c.sampled_us, c.roofline_us) END AS us,
    s.baseline_us AS measured_us, c.sampled_us, c.roofline_us
FROM (
    SELECT d.problem_id, d.environment_id, d.solution_id,
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
LEFT JOIN solution s ON s.id = c.measured_id;

-- What each problem is tuned as: itself, or its fine bucket once more than three sizes of that were seen here or asked for.
-- unit_id: the same for problems that are tuned together. What a call costs is in problem_cost, to be joined by key.
CREATE VIEW unit AS
SELECT d.problem_id, d.environment_id, p.rest, p.m, d.calls, d.recent, d.recent_day, d.last_seen_us, d.asked_us,
    d.solution_id, coalesce(b.first_id, d.problem_id) AS unit_id,
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.family, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.covered THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act, h.key AS device,
    1 AS problems,
    max(t.covered) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
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
CREATE VIEW untuned AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, u.calls, u.calls * c.us AS est_time_us,
    0.3 * c.us * (
        u.recent / (1 << min(max(CAST(strftime('%s', 'now') AS INTEGER) / 86400 - u.recent_day, 0), 62))
        + CASE WHEN EXISTS (SELECT 1 FROM sighting_before) THEN coalesce((
            SELECT sum(1.0 * s.calls / (1 << min(max((CAST(strftime('%s', 'now') AS INTEGER) / 3600 - s.hour) / 24, 0), 40)))
            FROM sighting_before s WHERE s.problem_id = u.problem_id AND s.environment_id = u.environment_id), 0) ELSE 0 END
    ) AS worth,
    0.3 * u.calls * c.us AS est_saving_us,
    CASE WHEN w.state = 'failed' THEN 'failed'
        WHEN w.owner IS NOT NULL AND w.lease_until_us > CAST(strftime('%s', 'now') AS INTEGER) * 1000000 THEN 'leased'
        WHEN u.asked_us IS NULL AND u.last_seen_us < (CAST(strftime('%s', 'now') AS INTEGER) - 604800) * 1000000 THEN 'stale'
        ELSE 'queued' END AS state,
    u.last_seen_us AS last_seen, u.covers, u.unit_m, coalesce(w.attempts, 0) AS attempts, coalesce(w.reason, '') AS reason,
    w.owner, e.key AS environment
FROM unit u
JOIN problem_cost c ON c.environment_id = u.environment_id AND c.problem_id = u.problem_id
JOIN problem p ON p.id = u.problem_id
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id AND w.covers = u.covers AND w.mode = 'eager'
WHERE u.solution_id IS NULL;

-- Tuned, but frozen in a captured graph: ten seconds after a publish no graph is captured with the old table any more.
CREATE VIEW frozen AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
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

-- Hits in rows that are not brought over yet, by solution: those of the hour in which one was retired are its successor's,
-- where a later row serves the same calls by the end of that hour, else its own. Rows that were retired as they came have none.
CREATE VIEW hits_before AS
SELECT s.id AS solution_id, g.problem_id, g.environment_id, g.run_id, g.hour, g.outcome, g.graph, g.calls
FROM reach r
JOIN solution s ON s.id = r.solution_id
JOIN sighting_before g ON g.problem_id = r.problem_id AND g.environment_id = r.environment_id
WHERE g.outcome = CASE s.covers WHEN 'exact' THEN 'exact' ELSE 'padded' END
    AND g.graph = (s.mode = 'graph')
    AND g.hour >= s.published_us / 3600000000
    AND s.generation IS NOT s.retired_generation
    AND (s.retired_us IS NULL OR g.hour < s.retired_us / 3600000000
        OR (g.hour = s.retired_us / 3600000000 AND NOT EXISTS (
            SELECT 1 FROM solution l
            JOIN environment_stamp la ON la.environment_id = g.environment_id AND la.backend = l.backend
                AND la.stamp = l.stamp
            WHERE l.problem_id = s.problem_id AND l.id > s.id AND l.device_id = s.device_id
                AND l.covers = s.covers AND l.mode = s.mode AND l.generation IS NOT l.retired_generation
                AND l.published_us / 3600000000 <= g.hour)));

-- hit_calls: calls that were hits of this solution when they were made; what they save is the measured share of what a
-- call costs in programs.
CREATE VIEW solutions AS
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, layout, weight_state,
    math_mode, deterministic, threads, experts, topk, "inter", act,
    device, mode, covers, backend, config, us, baseline_us, speedup,
    hit_calls * (baseline_us - us) * price AS saved_us, hit_calls,
    gain_low, err, baseline_err, tflops, gb_s, environment, stamp, generation, state, published, retired, reason, others, recheck
FROM (
    SELECT p.text AS problem, p.*, h.key AS device, s.mode, s.covers, s.backend, s.config, s.us, s.baseline_us,
        s.baseline_us / s.us AS speedup,
        s.hits_before
        + max(CASE WHEN s.retired_generation IS NOT NULL THEN coalesce(s.hits_to - coalesce(s.hits_from, 0), 0)
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
