-- 0006_recheck: solutions are raced again when what they were measured under has changed, when asked, or as a sample.
-- Before this, a new driver left every solution in use as it was, and drift was noticed by nobody.
ALTER TABLE solution ADD COLUMN conditions TEXT NOT NULL DEFAULT ''
    CHECK (length(conditions) <= 512);                      -- soft facts of the measurement ("driver 580.1"); '' not known
ALTER TABLE solution ADD COLUMN recheck TEXT
    CHECK (recheck IN ('conditions', 'asked', 'drift'));    -- why it waits to be raced again; NULL: it does not
CREATE INDEX solution_to_recheck ON solution (recheck) WHERE recheck IS NOT NULL;
-- What crashed or hung, looked at before every order.
CREATE INDEX trial_that_killed ON trial (backend, config) WHERE outcome IN ('crash', 'hang');
