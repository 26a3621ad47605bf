-- 0031_covered: a verdict of another environment on this device (another torch, say) takes the calls of an older one over
-- where it may serve wherever that does: the newest is looked up. They counted for both, and gains for more than was
-- saved. The older one counts on when the newer is withdrawn.

CREATE TRIGGER solution_covered AFTER INSERT ON solution WHEN NEW.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    WHERE hits_to IS NULL AND retired_generation IS NULL AND id < NEW.id AND environment_id <> NEW.environment_id
        AND problem_id = NEW.problem_id AND device_id = NEW.device_id AND covers = NEW.covers AND mode = NEW.mode
        AND NOT EXISTS (
            SELECT 1 FROM environment_stamp b JOIN environment e ON e.id = b.environment_id
            WHERE b.backend = solution.backend AND b.stamp = solution.stamp AND e.device_id = solution.device_id
                AND NOT EXISTS (
                SELECT 1 FROM environment_stamp a
                WHERE a.environment_id = b.environment_id AND a.backend = NEW.backend AND a.stamp = NEW.stamp));
END;

CREATE TRIGGER solution_uncovered AFTER UPDATE OF retired_generation ON solution
WHEN NEW.retired_generation IS NOT NULL AND OLD.retired_generation IS NULL BEGIN
    UPDATE solution SET hits_to = NULL, hits_from = coalesce(hits_from, 0) - hits_to
        + coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
    WHERE hits_to IS NOT NULL AND retired_generation IS NULL AND id <> NEW.id
        AND problem_id = NEW.problem_id AND device_id = NEW.device_id AND covers = NEW.covers AND mode = NEW.mode
        AND NOT EXISTS (SELECT 1 FROM solution y WHERE y.retired_generation IS NULL AND y.id > solution.id
            AND y.problem_id = NEW.problem_id AND y.device_id = NEW.device_id AND y.covers = NEW.covers AND y.mode = NEW.mode
            AND NOT EXISTS (
            SELECT 1 FROM environment_stamp b JOIN environment e ON e.id = b.environment_id
            WHERE b.backend = solution.backend AND b.stamp = solution.stamp AND e.device_id = solution.device_id
                AND NOT EXISTS (
                SELECT 1 FROM environment_stamp a
                WHERE a.environment_id = b.environment_id AND a.backend = y.backend AND a.stamp = y.stamp)));
END;

UPDATE solution SET hits_to = coalesce((SELECT sum(r.hits) FROM reach r WHERE r.solution_id = solution.id), 0)
WHERE hits_to IS NULL AND retired_generation IS NULL AND EXISTS (
    SELECT 1 FROM solution y WHERE y.retired_generation IS NULL AND y.id > solution.id
        AND y.problem_id = solution.problem_id AND y.device_id = solution.device_id AND y.covers = solution.covers
        AND y.mode = solution.mode
        AND NOT EXISTS (
            SELECT 1 FROM environment_stamp b JOIN environment e ON e.id = b.environment_id
            WHERE b.backend = solution.backend AND b.stamp = solution.stamp AND e.device_id = solution.device_id
                AND NOT EXISTS (
                SELECT 1 FROM environment_stamp a
                WHERE a.environment_id = b.environment_id AND a.backend = y.backend AND a.stamp = y.stamp)));
