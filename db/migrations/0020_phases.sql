-- 0020_phases: calls of warm-ups, profile runs and the like, which a program has named as such (gemmtuned.phase).
-- They are no traffic of users: nothing that says what is worth tuning, or how much is covered, reads them.
-- Kept for four weeks.
CREATE TABLE phase_call (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    phase TEXT NOT NULL CHECK (length(phase) BETWEEN 1 AND 60),
    hour INTEGER NOT NULL,                                  -- since 1970, UTC
    calls INTEGER NOT NULL CHECK (calls > 0),
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (hour, phase, problem_id, environment_id, run_id)
) STRICT, WITHOUT ROWID;

CREATE VIEW phases AS
SELECT c.phase, p.text AS problem, h.key AS device, r.name AS run, sum(c.calls) AS calls,
    max(c.last_seen_us) AS last_seen
FROM phase_call c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY c.phase, c.problem_id, h.id, r.id;
