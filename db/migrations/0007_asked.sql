-- 0007_asked: sizes that somebody asks for fill a bucket as sizes that were called do.
-- Before this, a list of a thousand sizes taken from a server's log was tuned size by size, for 70 buckets' worth of work.
DROP VIEW unit;
CREATE VIEW unit AS
SELECT problem_id, environment_id, rest, m, calls, solution_id, us,
    CASE WHEN sizes > 3 THEN 'fine' ELSE 'exact' END AS covers,
    CASE WHEN sizes > 3 THEN m_fine ELSE m END AS unit_m
FROM (
    SELECT c.problem_id, c.environment_id, c.solution_id, c.us, d.calls, p.rest, p.m, p.m_fine,
        count(*) OVER (PARTITION BY c.environment_id, p.rest, p.m_fine) AS sizes
    FROM problem_cost c
    JOIN demand d ON d.environment_id = c.environment_id AND d.problem_id = c.problem_id
    JOIN problem p ON p.id = c.problem_id
);
