-- 0030_unfit: calls with operands that a solution's kernel does not take (how they lie, where they begin) are not covered
-- either. Programs note them as `operands` among the operators in demand.wanted; the columns of 0029 count both kinds.

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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unserved,
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
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unserved,
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
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls,
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
    SELECT t.*, c.us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned, c.waits AND t.missed_calls > 0 AS unserved,
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
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.problem_id, h.id
);

DROP VIEW frozen;
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
    AND NOT (d.wanted NOT IN ('', 'operands') AND d.wanted_of = d.solution_id)
GROUP BY g.problem_id, g.environment_id, g.run_id
);

DROP VIEW unraced;
CREATE VIEW unraced AS
SELECT p.text AS problem, h.key AS device, trim(replace(' ' || d.wanted || ' ', ' operands ', ' ')) AS operators,
    s.backend, s.beside, d.calls, d.calls - d.exact_calls - d.padded_calls AS missed, d.last_seen_us AS last_seen,
    datetime(d.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM demand d
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id
JOIN device h ON h.id = e.device_id
WHERE d.wanted NOT IN ('', 'operands') AND d.wanted_of = d.solution_id;

-- Calls that no solution serves though there is one: its kernel does not take their operands.
CREATE VIEW unfit AS
SELECT p.text AS problem, h.key AS device, s.backend, s.config, d.calls,
    d.calls - d.exact_calls - d.padded_calls AS missed, d.last_seen_us AS last_seen,
    datetime(d.last_seen_us / 1000000, 'unixepoch') AS last_seen_at
FROM demand d
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id
JOIN device h ON h.id = e.device_id
WHERE d.wanted_of = d.solution_id AND instr(' ' || d.wanted || ' ', ' operands ');
