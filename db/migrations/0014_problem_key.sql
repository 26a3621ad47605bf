-- 0014_problem_key: a problem's key says what it means, and state stands in columns.
-- Before this, the key was a list by position, so a column that came later changed the text of every row; both scales of a
-- product were one word; and whether a person had withdrawn a solution was read out of an English sentence.
-- Scales of both operands, how a packed weight lies. Of scales, 0.1.0 knew only how many values that of X had.
ALTER TABLE problem ADD COLUMN wscale TEXT NOT NULL DEFAULT 'none';
ALTER TABLE problem ADD COLUMN scale_dtype TEXT NOT NULL DEFAULT 'fp32';
ALTER TABLE problem ADD COLUMN wscale_dtype TEXT NOT NULL DEFAULT 'fp32';
ALTER TABLE problem ADD COLUMN scale_layout TEXT NOT NULL DEFAULT 'row';
ALTER TABLE problem ADD COLUMN wscale_layout TEXT NOT NULL DEFAULT 'row';
ALTER TABLE problem ADD COLUMN packing TEXT NOT NULL DEFAULT '';
-- The kind of operands, as Problem.operands says it: what a version can tune or not is told by it
ALTER TABLE problem ADD COLUMN operands TEXT NOT NULL DEFAULT '';
UPDATE problem SET wscale = CASE scale WHEN '1x128' THEN '128x128' ELSE scale END,
    scale_dtype = CASE scale WHEN '1x32' THEN 'e8m0' ELSE 'fp32' END,
    wscale_dtype = CASE scale WHEN '1x32' THEN 'e8m0' ELSE 'fp32' END
WHERE scale <> 'none';
UPDATE problem SET operands = family || ' ' || dtype || '/' || wdtype || '>' || out_dtype || ' ' || scale || '/' || wscale
    || ' ' || weight_state;
-- name=value of all that differs from what it is when nothing is said (Problem.rest), where it was a list by position
UPDATE problem SET rest = substr(
    CASE WHEN family <> 'dense' THEN ',family=' || family ELSE '' END
    || CASE WHEN batch <> 1 THEN ',batch=' || batch ELSE '' END
    || ',n=' || n || ',k=' || k
    || CASE WHEN bias THEN ',bias=1' ELSE '' END
    || CASE WHEN dtype <> 'bf16' THEN ',dtype=' || dtype ELSE '' END
    || CASE WHEN wdtype <> dtype THEN ',wdtype=' || wdtype ELSE '' END
    || CASE WHEN out_dtype <> dtype THEN ',out_dtype=' || out_dtype ELSE '' END
    || CASE WHEN scale <> 'none' THEN ',scale=' || scale ELSE '' END
    || CASE WHEN layout <> 'nt' THEN ',layout=' || layout ELSE '' END
    || CASE WHEN weight_state <> 'plain' THEN ',weight_state=' || weight_state ELSE '' END
    || CASE WHEN math_mode <> 'ieee' THEN ',math_mode=' || math_mode ELSE '' END
    || CASE WHEN deterministic THEN ',deterministic=1' ELSE '' END
    || CASE WHEN threads <> 0 THEN ',threads=' || threads ELSE '' END
    || coalesce(',experts=' || experts, '') || coalesce(',topk=' || topk, '')
    || coalesce(',inter=' || "inter", '') || coalesce(',act=' || act, ''), 2);
-- A row of X visits one group: these were too large by the number of groups. A full C is read, too.
UPDATE problem SET flops = flops / batch,
    bytes = bytes - (batch - 1.0) * (bytes / batch - 1.0 * n * k * (CASE wdtype WHEN 'fp32' THEN 4 WHEN 'fp64' THEN 8
        WHEN 'bf16' THEN 2 WHEN 'fp16' THEN 2 ELSE 1 END))
WHERE family = 'grouped';
UPDATE problem SET bytes = bytes + 1.0 * batch * m * n * (CASE out_dtype WHEN 'fp32' THEN 4 WHEN 'c32' THEN 4
    WHEN 'fp64' THEN 8 WHEN 'c64' THEN 8 WHEN 'i64' THEN 8 WHEN 'c128' THEN 16 WHEN 'i32' THEN 4 WHEN 'bf16' THEN 2
    WHEN 'fp16' THEN 2 WHEN 'i16' THEN 2 ELSE 1 END)
WHERE family IN ('dense_add', 'batched_add');

-- State stands in columns: `reason` is for people and decides nothing
ALTER TABLE work ADD COLUMN cause TEXT NOT NULL DEFAULT ''
    CHECK (cause IN ('', 'failed', 'lapsed', 'put_off', 'withdrawn', 'rolled_back'));  -- why it is as it is
UPDATE work SET cause = CASE WHEN reason LIKE 'put off: %' THEN 'put_off' WHEN reason LIKE 'withdrawn: %' THEN 'withdrawn'
    WHEN reason LIKE 'rolled back to %' THEN 'rolled_back' WHEN reason LIKE 'its lease lapsed%' THEN 'lapsed'
    WHEN reason <> '' THEN 'failed' ELSE '' END;
UPDATE trial SET outcome = 'killed' WHERE outcome = 'crash' AND note LIKE '%SIGKILL%';
