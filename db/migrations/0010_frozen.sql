-- 0010_frozen: tuned, but frozen in a captured graph.
-- Before this, a server that captured its CUDA graphs before a publish looked covered, and ran its old kernels for ever.
-- Ten seconds after the publish no graph is captured with the old table any more.
CREATE VIEW frozen AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, sum(g.calls) AS calls, s.generation, max(g.last_seen_us) AS last_seen
FROM sighting g
JOIN verdict v ON v.problem_id = g.problem_id AND v.environment_id = g.environment_id
JOIN solution s ON s.id = v.solution_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id
WHERE g.graph = 1 AND g.outcome = 'miss' AND s.state <> 'default_best'
    AND g.last_seen_us > s.published_us + 10000000
GROUP BY g.problem_id, g.environment_id, g.run_id;
