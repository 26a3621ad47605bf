-- 0015_reported: what fails in a program is run by the daemon before it is withdrawn.
-- Before this one program short of memory took a good solution from all, for good.
ALTER TABLE quarantine ADD COLUMN how TEXT NOT NULL DEFAULT 'failed'
    CHECK (how IN ('failed', 'wrong'));                     -- it raised; its result was compared with torch's and is another
ALTER TABLE quarantine ADD COLUMN cleared_us INTEGER;       -- when the daemon's own run last found nothing; NULL: never
ALTER TABLE solution ADD COLUMN reported_us INTEGER;        -- since when it waits for that run; NULL: it does not
CREATE INDEX solution_reported ON solution (reported_us) WHERE reported_us IS NOT NULL;
-- What was withdrawn on a program's word stays withdrawn.
UPDATE quarantine SET how = 'wrong' WHERE taken_us IS NOT NULL;
