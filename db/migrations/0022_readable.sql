-- 0022_readable: what people who open the file read first: percents, times of day as text, and `traffic`, which has every
-- count beside what serves it now, so that any window of time can be asked for. The views are as before, with more columns.

DROP VIEW coverage;
DROP VIEW coverage_by_run;
DROP VIEW coverage_by_problem;
DROP VIEW untuned;
DROP VIEW solutions;
DROP VIEW trials;
DROP VIEW sessions;
DROP VIEW compiled;
DROP VIEW hints;
DROP VIEW frozen;
DROP VIEW phases;

CREATE VIEW coverage AS
SELECT *,
    round(100.0 * covered_time_us / nullif(time_us, 0), 1) AS covered_percent,
    round(100.0 * covered_calls / nullif(calls, 0), 1) AS covered_calls_percent,
    round(100.0 * (exact_calls + padded_calls) / nullif(calls, 0), 1) AS hit_percent
FROM (
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
GROUP BY p.family, h.id
);

CREATE VIEW coverage_by_run AS
SELECT *,
    round(100.0 * covered_time_us / nullif(time_us, 0), 1) AS covered_percent,
    round(100.0 * covered_calls / nullif(calls, 0), 1) AS covered_calls_percent,
    round(100.0 * (exact_calls + padded_calls) / nullif(calls, 0), 1) AS hit_percent,
    datetime(first_hour / 1000000, 'unixepoch') AS first_hour_at,
    datetime(last_hour / 1000000, 'unixepoch') AS last_hour_at
FROM (
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
GROUP BY t.run_id, h.id
);

CREATE VIEW coverage_by_problem AS
SELECT *,
    round(100.0 * covered_time_us / nullif(time_us, 0), 1) AS covered_percent,
    round(100.0 * covered_calls / nullif(calls, 0), 1) AS covered_calls_percent,
    round(100.0 * (exact_calls + padded_calls) / nullif(calls, 0), 1) AS hit_percent,
    datetime(first_hour / 1000000, 'unixepoch') AS first_hour_at,
    datetime(last_hour / 1000000, 'unixepoch') AS last_hour_at
FROM (
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
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act, h.key AS device,
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
GROUP BY t.problem_id, h.id
);

CREATE VIEW untuned AS
SELECT *,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
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
WHERE u.solution_id IS NULL
);

CREATE VIEW solutions AS
SELECT *,
    round(100.0 * (1 - us / baseline_us), 1) AS faster_percent,
    datetime(published / 1000000, 'unixepoch') AS published_at,
    datetime(retired / 1000000, 'unixepoch') AS retired_at
FROM (
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, wscale, scale_dtype, wscale_dtype,
    scale_layout, wscale_layout, layout, weight_state, packing, math_mode, deterministic, batch_invariant,
    threads, experts, topk, "inter", act,
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
)
);

CREATE VIEW trials AS
SELECT *,
    datetime(started / 1000000, 'unixepoch') AS started_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, t.mode, t.backend, t.config, t.phase, t.us, t.err, t.outcome, t.note, t.started_us AS started, t.owner,
    e.key AS environment, t.stamp
FROM trial t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
);

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
    started_us AS started, beat_us AS last_seen, ended_us AS ended, sqlite_version, store_dev, store_ino, rank, namespace
FROM session
);

CREATE VIEW compiled AS
SELECT *,
    datetime(first_seen / 1000000, 'unixepoch') AS first_seen_at,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, c.kernel, c.first_seen_us AS first_seen, c.last_seen_us AS last_seen
FROM compiled_gemm c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id
);

CREATE VIEW hints AS
SELECT *,
    datetime(imported / 1000000, 'unixepoch') AS imported_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.kind, h.backend, h.config, h.arch, h.units, h.us, h.format, h.family AS table_family, h.source, h.line,
    h.text AS row, h.imported_us AS imported
FROM hint h LEFT JOIN problem p ON p.id = h.problem_id
);

CREATE VIEW frozen AS
SELECT *,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
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
GROUP BY g.problem_id, g.environment_id, g.run_id
);

CREATE VIEW phases AS
SELECT *,
    datetime(last_seen / 1000000, 'unixepoch') AS last_seen_at
FROM (
SELECT c.phase, p.text AS problem, h.key AS device, r.name AS run, sum(c.calls) AS calls,
    max(c.last_seen_us) AS last_seen
FROM phase_call c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY c.phase, c.problem_id, h.id, r.id
);

-- One row for each hour, run, problem, outcome and device; hours of before are merged to days and blocks of four weeks, and
-- then `hour` is the first of them. What serves a problem is today's, found as the look-up does: for this M, else padded.
CREATE VIEW traffic AS
WITH cost AS MATERIALIZED (  -- once for each problem, not for each row
    SELECT c.problem_id, c.environment_id, c.us, s.id AS solution_id, s.backend, s.config, s.covers, s.generation,
        CASE WHEN s.id IS NULL THEN 'none' WHEN s.state = 'default_best' THEN 'best' ELSE 'faster' END AS answer,
        s.baseline_us / s.us AS gain
    FROM problem_cost c LEFT JOIN solution s ON s.id = c.solution_id
)
SELECT g.hour * 3600000000 AS hour, datetime(g.hour * 3600, 'unixepoch') AS hour_at, r.name AS run, p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, g.outcome, g.graph, g.calls, g.calls * p.flops AS flops, g.calls * c.us AS time_us,
    g.calls * c.us / coalesce(c.gain, 1.0) AS now_us, c.answer, c.backend, c.config, c.covers, c.gain, c.generation,
    g.last_seen_us AS last_seen, datetime(g.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM every_sighting g
JOIN cost c ON c.environment_id = g.environment_id AND c.problem_id = g.problem_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id;
