-- 0029_waits: calls of an engine's operator that its own kernel runs, since the solution was not raced beside it, are not
-- covered. A problem that programs call by such an operator has calls of torch's own product as well, which are served: so
-- of a problem that waits for a race those calls are covered that hit, and the others have no verdict.

DROP VIEW problem_cost;
CREATE VIEW problem_cost AS
SELECT c.problem_id, c.environment_id, c.solution_id, c.waits,
    CASE WHEN s.others > 0.15 AND c.sampled_calls >= 4 THEN c.sampled_us
        ELSE coalesce(s.baseline_us, c.sampled_us, c.roofline_us) END AS us,
    s.baseline_us AS measured_us, c.sampled_us, c.roofline_us
FROM (
    SELECT d.problem_id, d.environment_id, d.solution_id,
        d.wanted <> '' AND d.wanted_of IS d.solution_id AND d.solution_id IS NOT NULL AS waits,
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

DROP VIEW coverage;
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unraced,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT p.family, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.tuned THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unraced THEN t.problem_id END) AS unraced_problems,
    sum(t.missed_calls * t.unraced) AS unraced_calls
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY p.family, h.id
);

DROP VIEW coverage_by_run;
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unraced,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT r.name AS run, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.tuned THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unraced THEN t.problem_id END) AS unraced_problems,
    sum(t.missed_calls * t.unraced) AS unraced_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN run r ON r.id = t.run_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.run_id, h.id
);

DROP VIEW coverage_by_problem;
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unraced,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act, h.key AS device,
    1 AS problems,
    max(t.tuned) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unraced THEN t.problem_id END) AS unraced_problems,
    sum(t.missed_calls * t.unraced) AS unraced_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.problem_id, h.id
);

DROP VIEW traffic;
CREATE VIEW traffic AS
WITH cost AS MATERIALIZED (  -- once for each problem, not for each row
    SELECT c.problem_id, c.environment_id, c.us, c.waits, s.id AS solution_id, s.backend, s.config, s.covers, s.generation,
        CASE WHEN s.id IS NULL THEN 'none' WHEN s.state = 'default_best' THEN 'best' ELSE 'faster' END AS answer,
        s.baseline_us / s.us AS gain
    FROM problem_cost c LEFT JOIN solution s ON s.id = c.solution_id
)
SELECT g.hour * 3600000000 AS hour, datetime(g.hour * 3600, 'unixepoch') AS hour_at, r.name AS run, p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.wscale, p.scale_dtype,
    p.wscale_dtype, p.scale_layout, p.wscale_layout, p.layout, p.weight_state, p.packing, p.math_mode, p.deterministic,
    p.batch_invariant, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, g.outcome, g.graph, g.calls, g.calls * p.flops AS flops, g.calls * c.us AS time_us,
    g.calls * c.us / CASE WHEN c.waits AND g.outcome = 'miss' THEN 1.0 ELSE coalesce(c.gain, 1.0) END AS now_us,
    CASE WHEN c.waits AND g.outcome = 'miss' THEN 'none' ELSE c.answer END AS answer,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.backend END AS backend,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.config END AS config,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.covers END AS covers,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.gain END AS gain,
    CASE WHEN NOT c.waits OR g.outcome <> 'miss' THEN c.generation END AS generation,
    g.last_seen_us AS last_seen, datetime(g.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM every_sighting g
JOIN cost c ON c.environment_id = g.environment_id AND c.problem_id = g.problem_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id;
