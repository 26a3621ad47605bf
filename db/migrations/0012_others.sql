-- 0012_others: how much of the device others used while a solution was measured.
-- Before this, times taken beside a busy program priced every call, and reports named twice the time there was to save.
-- The ratio of such a race is sound, its microseconds are not: where a program's own calls were timed (4 of them at
-- least), those are the price. 0.15 is CROWDED of configs/solution.py.
ALTER TABLE solution ADD COLUMN others REAL CHECK (others BETWEEN 0 AND 1);  -- mean share; NULL: not known

DROP VIEW problem_cost;
CREATE VIEW problem_cost AS
SELECT c.problem_id, c.environment_id, c.solution_id,
    CASE WHEN s.others > 0.15 AND c.sampled_calls >= 4 THEN c.sampled_us
        ELSE coalesce(s.baseline_us, c.sampled_us, c.roofline_us) END AS us,
    s.baseline_us AS measured_us, c.sampled_us, c.roofline_us
FROM (
    SELECT v.problem_id, v.environment_id, v.solution_id,
        coalesce(
            (SELECT s.id FROM solution s
                WHERE s.problem_id = v.problem_id AND s.environment_id = v.environment_id
                ORDER BY s.generation DESC LIMIT 1),
            v.solution_id
        ) AS measured_id,
        d.sampled_calls, d.sampled_us / nullif(d.sampled_calls, 0) AS sampled_us,
        p.flops / r.flops_per_us + p.bytes / r.bytes_per_us + r.call_us AS roofline_us
    FROM verdict v
    JOIN demand d ON d.environment_id = v.environment_id AND d.problem_id = v.problem_id
    JOIN problem p ON p.id = v.problem_id
    JOIN environment e ON e.id = v.environment_id
    JOIN device h ON h.id = e.device_id
    JOIN roofline r ON r.kind = CASE WHEN h.kind IN ('cuda', 'rocm') THEN h.kind ELSE 'cpu' END
) c
LEFT JOIN solution s ON s.id = c.measured_id;

-- As before, with `others` and `recheck` (why it waits to be raced again); what a call saves is the measured share of what it costs in programs.
-- Hits are counted by whole hours: those of the hour in which a solution was retired are its successor's, where a later row
-- serves the same calls by the end of that hour, else its own. Rows that were retired as they came (a pin stayed) have none.
DROP VIEW solutions;
CREATE VIEW solutions AS
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, layout, weight_state,
    math_mode, deterministic, threads, experts, topk, "inter", act,
    device, mode, covers, backend, config, us, baseline_us, speedup,
    hit_calls * (baseline_us - us) * price AS saved_us, hit_calls,
    gain_low, err, baseline_err, tflops, gb_s, environment, stamp, generation, state, published, retired, reason, others, recheck
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
                AND s.generation IS NOT s.retired_generation
                AND (s.retired_us IS NULL OR g.hour < s.retired_us / 3600000000
                    OR (g.hour = s.retired_us / 3600000000 AND NOT EXISTS (
                        SELECT 1 FROM solution l
                        JOIN environment_stamp la ON la.environment_id = g.environment_id AND la.backend = l.backend
                            AND la.stamp = l.stamp
                        WHERE l.problem_id = s.problem_id AND l.id > s.id AND l.device_id = s.device_id
                            AND l.covers = s.covers AND l.mode = s.mode AND l.generation IS NOT l.retired_generation
                            AND l.published_us / 3600000000 <= g.hour)))), 0) AS hit_calls,
        CASE WHEN s.others > 0.15 THEN coalesce((
            SELECT CASE WHEN sum(d.sampled_calls) >= 4
                THEN sum(d.sampled_us) / sum(d.sampled_calls) / s.baseline_us END
            FROM problem q
            JOIN demand d ON d.problem_id = q.id
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            JOIN environment de ON de.id = d.environment_id AND de.device_id = s.device_id
            WHERE q.rest = p.rest
                AND q.m > CASE s.covers WHEN 'exact' THEN p.m - 1 WHEN 'fine' THEN p.m - 128 ELSE p.m / 2 END
                AND q.m <= CASE WHEN s.covers = 'coarse' AND p.m >= 8192 THEN 2147483647 ELSE p.m END
                AND p.m = CASE s.covers WHEN 'exact' THEN q.m WHEN 'fine' THEN q.m_fine ELSE q.m_coarse END
        ), 1.0) ELSE 1.0 END AS price,
        s.gain_low, s.err, s.baseline_err, p.flops / s.us / 1e6 AS tflops, p.bytes / s.us / 1e3 AS gb_s,
        e.key AS environment, s.stamp, s.generation, s.state, s.published_us AS published, s.retired_us AS retired,
        s.reason, s.others, s.recheck
    FROM solution s
    JOIN problem p ON p.id = s.problem_id
    JOIN device h ON h.id = s.device_id
    JOIN environment e ON e.id = s.environment_id
);
