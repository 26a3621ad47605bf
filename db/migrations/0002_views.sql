-- 0002_views: the questions people ask, answered for whoever opens the file with sqlite-utils, datasette or pandas.
-- coverage*, untuned, solutions, trials and sessions are promises: their columns keep name and meaning.
-- verdict, problem_cost and unit are ours: what the look-up finds, what a call costs, what is tuned together.

-- The live solution that the look-up finds for a problem in an environment: exact M, then fine, then coarse; NULL is a miss.
CREATE VIEW verdict AS
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

-- Microseconds a call by the default: measured when it was tuned (in this environment, else by the solution in use), else the
-- mean of calls timed on the way, else the roofline. One number whether covered or not, so that coverage by time is a share.
CREATE VIEW problem_cost AS
SELECT problem_id, environment_id, solution_id, coalesce(measured_us, sampled_us, roofline_us) AS us,
    measured_us, sampled_us, roofline_us
FROM (
    SELECT v.problem_id, v.environment_id, v.solution_id,
        coalesce(
            (SELECT s.baseline_us FROM solution s
                WHERE s.problem_id = v.problem_id AND s.environment_id = v.environment_id
                ORDER BY s.generation DESC LIMIT 1),
            (SELECT s.baseline_us FROM solution s WHERE s.id = v.solution_id)
        ) AS measured_us,
        d.sampled_us / nullif(d.sampled_calls, 0) AS sampled_us,
        p.flops / r.flops_per_us + p.bytes / r.bytes_per_us + r.call_us AS roofline_us
    FROM verdict v
    JOIN demand d ON d.environment_id = v.environment_id AND d.problem_id = v.problem_id
    JOIN problem p ON p.id = v.problem_id
    JOIN environment e ON e.id = v.environment_id
    JOIN device h ON h.id = e.device_id
    JOIN roofline r ON r.kind = CASE WHEN h.kind IN ('cuda', 'rocm') THEN h.kind ELSE 'cpu' END
);

-- What each problem is tuned as: itself, or its fine bucket once more than three sizes of that were seen here. The window
-- keeps SQLite from merging this into its user, so verdict and cost are looked up once a row: join no other view to it.
CREATE VIEW unit AS
SELECT problem_id, environment_id, rest, m, calls, solution_id, us,
    CASE WHEN sizes > 3 THEN 'fine' ELSE 'exact' END AS covers,
    CASE WHEN sizes > 3 THEN m_fine ELSE m END AS unit_m
FROM (
    SELECT c.problem_id, c.environment_id, c.solution_id, c.us, d.calls, p.rest, p.m, p.m_fine,
        sum(d.calls > 0) OVER (PARTITION BY c.environment_id, p.rest, p.m_fine) AS sizes
    FROM problem_cost c
    JOIN demand d ON d.environment_id = c.environment_id AND d.problem_id = c.problem_id
    JOIN problem p ON p.id = c.problem_id
);

CREATE VIEW coverage AS
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls
    FROM sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (  -- else SQLite would look the verdict up again for every column that uses it
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
    FROM sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id, run_id
),
known AS MATERIALIZED (  -- else SQLite would look the verdict up again for every column that uses it
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
    FROM sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (  -- else SQLite would look the verdict up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device,
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

-- worth: calls of the last 24 h count once, of the day before half, and so on; times the time a call, times the share we
-- expect to save (0.3 until trials tell more). calls and est_time_us are of all time.
CREATE VIEW untuned AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, d.calls, d.calls * u.us AS est_time_us,
    0.3 * u.us * coalesce((
        SELECT sum(1.0 * s.calls / (1 << min(max((CAST(strftime('%s', 'now') AS INTEGER) / 3600 - s.hour) / 24, 0), 40)))
        FROM sighting s WHERE s.problem_id = d.problem_id AND s.environment_id = d.environment_id), 0) AS worth,
    0.3 * d.calls * u.us AS est_saving_us,
    CASE WHEN w.state = 'failed' THEN 'failed'
        WHEN w.owner IS NOT NULL AND w.lease_until_us > CAST(strftime('%s', 'now') AS INTEGER) * 1000000 THEN 'leased'
        ELSE 'queued' END AS state,
    d.last_seen_us AS last_seen, u.covers, u.unit_m, coalesce(w.attempts, 0) AS attempts, coalesce(w.reason, '') AS reason,
    w.owner, e.key AS environment
FROM unit u
JOIN demand d ON d.environment_id = u.environment_id AND d.problem_id = u.problem_id
JOIN problem p ON p.id = u.problem_id
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id AND w.covers = u.covers AND w.mode = 'eager'
WHERE u.solution_id IS NULL;

-- hit_calls: observed calls that this solution served, from the hour it was published; saved_us: what they saved.
CREATE VIEW solutions AS
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, layout, weight_state,
    math_mode, deterministic, threads, experts, topk, "inter", act,
    device, mode, covers, backend, config, us, baseline_us, speedup, hit_calls * (baseline_us - us) AS saved_us, hit_calls,
    gain_low, err, baseline_err, tflops, gb_s, environment, stamp, generation, state, published, retired, reason
FROM (
    SELECT p.text AS problem, p.*, h.key AS device, s.mode, s.covers, s.backend, s.config, s.us, s.baseline_us,
        s.baseline_us / s.us AS speedup,
        coalesce((
            SELECT sum(g.calls) FROM problem q
            JOIN sighting g ON g.problem_id = q.id
            JOIN environment_stamp a ON a.environment_id = g.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            JOIN environment ge ON ge.id = g.environment_id AND ge.device_id = s.device_id
            WHERE q.rest = p.rest
                AND q.m > CASE s.covers WHEN 'exact' THEN p.m - 1 WHEN 'fine' THEN p.m - 128 ELSE p.m / 2 END
                AND q.m <= CASE WHEN s.covers = 'coarse' AND p.m >= 8192 THEN 2147483647 ELSE p.m END
                AND p.m = CASE s.covers WHEN 'exact' THEN q.m WHEN 'fine' THEN q.m_fine ELSE q.m_coarse END
                AND g.outcome = CASE s.covers WHEN 'exact' THEN 'exact' ELSE 'padded' END
                AND g.graph = (s.mode = 'graph')
                AND g.hour >= s.published_us / 3600000000
                AND (s.retired_us IS NULL OR g.hour <= s.retired_us / 3600000000)), 0) AS hit_calls,
        s.gain_low, s.err, s.baseline_err, p.flops / s.us / 1e6 AS tflops, p.bytes / s.us / 1e3 AS gb_s,
        e.key AS environment, s.stamp, s.generation, s.state, s.published_us AS published, s.retired_us AS retired,
        s.reason
    FROM solution s
    JOIN problem p ON p.id = s.problem_id
    JOIN device h ON h.id = s.device_id
    JOIN environment e ON e.id = s.environment_id
);

CREATE VIEW trials AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, t.mode, t.backend, t.config, t.phase, t.us, t.err, t.outcome, t.note, t.started_us AS started, t.owner,
    e.key AS environment
FROM trial t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id;

-- state: live (heard of in the last 30 s), silent (killed, or its store is full or locked), ended.
CREATE VIEW sessions AS
SELECT host, pid, run, path, generation, active_us, calls, dropped, errors, reload_failures, note,
    CASE WHEN ended_us IS NOT NULL THEN 'ended'
        WHEN beat_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 30) * 1000000 THEN 'live'
        ELSE 'silent' END AS state,
    started_us AS started, beat_us AS last_seen, ended_us AS ended, sqlite_version, store_dev, store_ino
FROM session;
