-- 0026_bytes_of_groups: of a grouped product no more weights are read than it has rows: Problem.bytes says so since.
UPDATE problem SET bytes = CAST(
    1.0 * m * k * (CASE WHEN dtype IN ('fp32', 'c32', 'i32') THEN 4 WHEN dtype IN ('fp64', 'c64', 'i64') THEN 8
        WHEN dtype IN ('bf16', 'fp16', 'i16') THEN 2 WHEN dtype = 'c128' THEN 16
        WHEN dtype IN ('fp4_e2m1', 'i4') THEN 0.5 ELSE 1 END)
    + 1.0 * min(batch, m) * n * k * (CASE WHEN wdtype IN ('fp32', 'c32', 'i32') THEN 4
        WHEN wdtype IN ('fp64', 'c64', 'i64') THEN 8 WHEN wdtype IN ('bf16', 'fp16', 'i16') THEN 2 WHEN wdtype = 'c128' THEN 16
        WHEN wdtype IN ('fp4_e2m1', 'i4') THEN 0.5 ELSE 1 END)
    + 1.0 * m * n * (CASE WHEN out_dtype IN ('fp32', 'c32', 'i32') THEN 4 WHEN out_dtype IN ('fp64', 'c64', 'i64') THEN 8
        WHEN out_dtype IN ('bf16', 'fp16', 'i16') THEN 2 WHEN out_dtype = 'c128' THEN 16
        WHEN out_dtype IN ('fp4_e2m1', 'i4') THEN 0.5 ELSE 1 END)
    AS INTEGER)
WHERE family = 'grouped';
