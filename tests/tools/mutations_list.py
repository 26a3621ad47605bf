"""The faults that mutations.py plants: one in each part that a user's results, counts or trust hang on."""

from __future__ import annotations

from typing import Final

from mutations import Mutation as M

_INTERPRETED: Final = "kernels/test_kernels_triton.py::test_kernel_is_right_at_odd_shapes_with_nan_padding"

MUTATIONS: Final = (
    # ---- db: what was counted and found
    M(
        "a lost lease still renews",
        "db/leases.py",
        "AND owner = ? AND attempts = ?",
        "AND owner = ? AND attempts >= ?",
        ("db/test_db_leases.py",),
    ),
    M(
        "a lease that another holds is taken",
        "db/leases.py",
        "AND (owner IS NULL OR lease_until_us <= :now OR leased_us > :now + :slack)\nRETURNING",
        "AND (owner IS NULL OR lease_until_us >= :now OR leased_us > :now + :slack)\nRETURNING",
        ("db/test_db_leases.py",),
    ),
    M(
        "a unit counts as a bucket one size too early",
        "db/leases.py",
        "GROUP BY p.rest, p.m_fine HAVING count(*) > 3",
        "GROUP BY p.rest, p.m_fine HAVING count(*) >= 3",
        ("db/test_db_leases.py",),
    ),
    M(
        "a verdict is installed without waiting for the disk",
        "db/connect.py",
        'conn.execute("PRAGMA synchronous = FULL")',
        'conn.execute("PRAGMA synchronous = NORMAL")',
        ("db/test_db_solutions.py::test_a_verdict_waits_for_the_disk_and_counts_do_not",),
    ),
    M(
        "counts of other users are added again at every look",
        "db/ingest.py",
        "more = (row[6] - had[0], row[7] - had[1], row[8] - had[2])",
        "more = (row[6], row[7], row[8])",
        ("db/test_db_ingest.py",),
    ),
    M(
        "a superseded solution stays live",
        "db/solutions.py",
        'conn.execute(RETIRE, ("stale", generation, now_us, f"superseded by generation {generation}", ids))',
        "pass",
        ("db/test_db_solutions.py",),
    ),
    M(
        "a change of what is live keeps its generation",
        "db/solutions.py",
        "generation = max(current_generation(conn) + 1, at_least)",
        "generation = max(current_generation(conn), at_least, 1)",
        ("db/test_db_solutions.py",),
    ),
    # ---- configs: keys, tables, AITER's rules
    M(
        "an off-by-one where a bucket ends",
        "configs/padding.py",
        "return -(-m // step) * step",
        "return (m // step + 1) * step",
        (
            "configs/test_configs_merge.py::test_padded_m_is_aiters",
            "hooks/test_hooks_native.py::test_padding_is_the_same_in_both_languages",
        ),
    ),
    M(
        "a wrong dtype code",
        "configs/key.py",
        '"dtype": DTYPES[problem.dtype], "wdtype": DTYPES[problem.wdtype],',
        '"dtype": DTYPES[problem.dtype], "wdtype": DTYPES[problem.dtype],',
        ("hooks/test_hooks_scaled.py", "hooks/test_hooks_native.py::test_a_problem_survives_packing"),
    ),
    M(
        "the hash of a published table is not looked at",
        "configs/manifest.py",
        "if sha256(data).hexdigest() != file.sha256:",
        "if not file.sha256:",
        (
            "hooks/test_hooks_watch.py::test_what_cannot_be_trusted_is_refused_with_one_line",
            "hooks/test_hooks_watch.py::test_a_table_cut_anywhere_is_refused",
        ),
    ),
    M(
        "the hash of a published kernel is not looked at",
        "configs/manifest.py",
        "if sha256(data).hexdigest() != digest:",
        "if not digest:",
        ("daemon/test_daemon_publish.py",),
    ),
    M(
        "a table that others could have written is read",
        "configs/manifest.py",
        "if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
        "if facts.st_mode & stat.S_IWGRP & stat.S_IWOTH:",
        (
            "hooks/test_hooks_watch.py::test_what_cannot_be_trusted_is_refused_with_one_line",
            "hooks/test_hooks_watch.py::test_a_table_cut_anywhere_is_refused",
        ),
    ),
    M(
        "a published file is not synced before it is renamed",
        "configs/manifest.py",
        "            os.fsync(fd)\n",
        "            pass\n",
        ("daemon/test_daemon_publish.py::test_a_published_file_is_on_the_disk_before_it_has_its_name",),
    ),
    M(
        "the slowest of equal rows wins",
        "configs/merge.py",
        "known is not None and us >= known",
        "known is not None and us <= known",
        ("configs/test_configs_merge.py",),
    ),
    # ---- daemon: what is published, and when
    M(
        "two publish at once",
        "daemon/publishing/publish.py",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ("daemon/test_daemon_publish.py::test_two_never_publish_at_once",),
    ),
    M(
        "a kernel is removed while it is published",
        "daemon/publishing/prune.py",
        "or path.name in named:",
        "or path.name in ():",
        ("daemon/test_daemon_prune.py",),
    ),
    M(
        "tuning goes on beside a busy program",
        "daemon/device/idle.py",
        "used_s / span_s >= limits.busy",
        "used_s / span_s >= 1.0 + limits.busy",
        ("daemon/test_daemon_idle.py",),
    ),
    M(
        "a gap in what was watched counts as idle",
        "daemon/device/idle.py",
        "or not 0 <= start_s - reading.at_s <= 1e-3 or",
        "or",
        ("daemon/test_daemon_idle.py",),
    ),
    M(
        "a result that the store refused is dropped",
        "daemon/seats/outbox.py",
        "                self.trouble = str(err)\n                return False",
        "                self.trouble = str(err)\n                self._waiting.clear()\n                return False",
        ("daemon/test_daemon_service.py",),
    ),
    M(
        "a wrong element outside the sampled rows passes",
        "daemon/child/checks.py",
        "_UNSAMPLED: Final = 1.5\n",
        "_UNSAMPLED: Final = 1e6\n",
        ("daemon/test_daemon_verify.py",),
    ),
    M(
        "strides of a result are not compared",
        "daemon/child/checks.py",
        "if y.stride() != stock.stride():",
        "if y.dim() != stock.dim():",
        ("daemon/test_daemon_verify.py",),
    ),
    # ---- hooks, in Python
    M(
        "the last batch is not flushed",
        "hooks/flush.py",
        "while not self._flush(last=True) and",
        "while False and",
        ("hooks/test_hooks_flush.py::test_the_last_batch_is_flushed_however_a_program_ends",),
    ),
    M(
        "what was flushed is flushed again",
        "hooks/pending.py",
        "            del self._counts[key]\n",
        "            pass\n",
        ("hooks/test_hooks_flush.py::test_sums_are_exact_over_many_flushes",),
    ),
    M(
        "an older generation replaces a newer one",
        "hooks/watch.py",
        "if manifest.generation < newer_than:",
        "if manifest.generation < 0:",
        (
            "hooks/test_hooks_watch.py::test_what_cannot_be_trusted_is_refused_with_one_line",
            "hooks/test_hooks_watch.py::test_a_table_cut_anywhere_is_refused",
        ),
    ),
    M(
        "of two rows for one problem the slower serves",
        "hooks/dispatch.py",
        "solution.us < unpack(best).us:",
        "solution.us > unpack(best).us:",
        ("hooks/test_hooks_dispatch.py",),
    ),
    M(
        "one death more is needed before a generation is condemned",
        "hooks/probation.py",
        "    if len(died) < DEATHS:\n",
        "    if len(died) <= DEATHS:\n",
        (
            "hooks/test_hooks_probation.py::test_a_death_in_a_routed_call_is_counted_for_its_run_and_generation_alone",
            "hooks/test_hooks_probation.py::test_a_generation_is_condemned_by_deaths_in_its_kernels_alone",
        ),
    ),
    M(
        "a weight that was edited is served by its packed copy",
        "hooks/native/frozen.h",
        "std::ranges::equal(stamp, stamp_of(w));",
        "stamp.size() == stamp_of(w).size();",
        ("hooks/test_hooks_freeze.py::test_a_weight_that_changed_after_freezing_is_served_plain",),
    ),
    # ---- hooks, in C++
    M(
        "the stride of W is ignored",
        "hooks/native/call.h",
        "p.layout = static_cast<uint8_t>(side(a, false) * 3 + side(b, true));",
        "p.layout = static_cast<uint8_t>(side(a, false) * 3 + 1);",
        ("hooks/test_hooks_native.py::test_counts_and_results_are_stock_torchs",),
    ),
    M(
        "the dtype of W is that of X",
        "hooks/native/call.h",
        "p.wdtype = static_cast<uint8_t>(b.scalar_type());",
        "p.wdtype = static_cast<uint8_t>(at::kFloat);",
        ("hooks/test_hooks_native.py::test_counts_and_results_are_stock_torchs",),
    ),
    M(
        "the scales of X stand for those of W",
        "hooks/native/scales.h",
        "p.wscale = both.w.kind, p.wscale_dtype",
        "p.wscale = both.x.kind, p.wscale_dtype",
        ("hooks/test_hooks_scaled.py",),
    ),
    M(
        "a drained count is drained again",
        "hooks/native/counters.h",
        "      c.seen_calls[o] = now;\n",
        "",
        (
            "hooks/test_hooks_native.py::test_counts_and_results_are_stock_torchs",
            "hooks/test_hooks_native.py::test_eight_threads_lose_nothing",
        ),
    ),
    M(
        "a thread that ends takes its counts along",
        "hooks/native/counters.h",
        "if (c.used.load(std::memory_order_relaxed)) bequeath(c);",
        "if (c.used.load(std::memory_order_relaxed) && mine == left_) bequeath(c);",
        ("hooks/test_hooks_guest.py::test_threads_that_come_and_go_lose_no_count_and_cost_nothing_that_grows",),
    ),
    M(
        "a route that failed is taken again",
        "hooks/native/routes.h",
        "if (failed.exchange(true)) return;",
        "if (failed.load()) return;",
        ("hooks/test_hooks_dispatch.py::test_a_failing_route_is_served_by_torch_reported_once_and_never_taken_again",),
    ),
    M(
        "a kernel is launched without its last block",
        "hooks/native/cuda_launch.h",
        "->sizes()[axis.dim] + axis.block - 1) / axis.block);",
        "->sizes()[axis.dim]) / axis.block);",
        (
            "hooks/test_hooks_fake_cuda.py::test_a_launch_through_the_driver_serves_the_call_and_is_counted",
            "kernels/test_launch_values.py",
        ),
    ),
    # ---- kernels
    M(
        "a dropped K tail",
        "kernels/triton/gemv.py",
        "STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)",
        "STEPS: tl.constexpr = K // (BLOCK_K * SPLIT) if K >= BLOCK_K * SPLIT else 1",
        (_INTERPRETED,),
    ),
    M(
        "the stride between rows of X is taken for K",
        "kernels/triton/tiles.py",
        "x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64) * ldx",
        "x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64) * K",
        (_INTERPRETED,),
    ),
    M(
        "the bias is left out where K is cut",
        "kernels/triton/warp_split_k.py",
        "            if bias is not None:\n                total += tl.load",
        "            if bias is not None and SPLIT < 2:\n                total += tl.load",
        (_INTERPRETED,),
    ),
    M(
        "the second tile of a group begins where the first does",
        "kernels/triton/scaled_grouped.py",
        "starts + (place - upto + tiles) * BLOCK_M",
        "starts",
        (_INTERPRETED,),
    ),
    M(
        "groups share the first one's scales",
        "kernels/triton/scaled_grouped.py",
        "scale_w + group.to(tl.int64) * apart + ws",
        "scale_w + ws",
        (_INTERPRETED,),
    ),
    M(
        "groups of fp8 that forbid fast sums get them",
        "kernels/triton/scaled_grouped.py",
        'if p.math_mode == "reduced" else',
        'if p.math_mode != "reduced" else',
        ("kernels/test_kernels_scaled_grouped.py",),
    ),
    M(
        "groups with a bias are routed",
        "hooks/native/cuda_grouped.h",
        "offsets->scalar_type() == at::kInt && !bias &&",
        "offsets->scalar_type() == at::kInt &&",
        ("hooks/test_hooks_fake_families.py",),
    ),
    M(
        "the counters of a split are not set back",
        "kernels/triton/split_k.py",
        "    tl.store(counters + tile, 0)\n",
        "    tl.store(counters + tile, 1)\n",
        (_INTERPRETED, "kernels/test_kernels_triton.py::test_every_launch_leaves_its_counters_zero"),
    ),
    M(
        "a padded block of rows is one row short",
        "kernels/backends/rows.py",
        "y[first : first + some] = made[:some]",
        "y[first : first + some - 1] = made[: some - 1]",
        ("hooks/test_batch_invariant.py",),
    ),
    M(
        "a bias is added to the wrong side",
        "kernels/backends/torch_.py",
        "torch.addmm(bias.unsqueeze(1), w.t(), x.t())",
        "torch.addmm(2 * bias.unsqueeze(1), w.t(), x.t())",
        ("kernels/test_kernels_backends.py::test_packed_weights_give_the_same_result",),
    ),
    M(
        "thread blocks of one shot read a step of K too few",
        "kernels/cuda/one_shot.cu",
        "steps = (part + 1) * STEPS / PARTS - first_step;",
        "steps = (part + 1) * STEPS / PARTS - first_step - (PARTS > 1);",
        ("kernels/test_kernels_cuda_ptx.py::test_sums_are_right_and_nothing_else_is_read_or_written",),
    ),
)
