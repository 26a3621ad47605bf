"""Programs that want a row to have the same bits in every batch: from their calls to one proven kernel for every M."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hooked import HERE, Home, publish, published
from noise import NoisyClock
from torch import Tensor

from gemmtuned.configs import key
from gemmtuned.configs.errors import CandidateFailed, ProblemError
from gemmtuned.configs.problem import CHAIN_M, Problem
from gemmtuned.configs.rows_config import read_rows
from gemmtuned.configs.solution import Candidate, Solution, cpu_device
from gemmtuned.daemon.child.chain_proof import prove
from gemmtuned.daemon.child.checks import Wrong
from gemmtuned.daemon.child.search import tune_modes
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.backends.base import StatelessKernel

CPU = torch.device("cpu")
ASKED = Problem(m=8, n=96, k=64, dtype="fp32", threads=2, batch_invariant=True)
ONE_BY_ONE = '{"block":1,"grain":1,"kernel":"torch"}'
ALL_BATCHES = """
import json, sys, torch
from hooked import wait_for
import gemmtuned
from gemmtuned.hooks import activate
torch.set_num_threads(1)
linear = torch.nn.functional.linear

def varies(n, k):
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=random) for rows in (256, n))
    alone = torch.cat([linear(x[i:i + 1], w) for i in range(256)])
    found = [m for m in range(1, 257) if not torch.equal(linear(x[256 - m:], w), alone[256 - m:])]
    wide = torch.cat([x, x, x[:88]])
    found += [] if torch.equal(linear(wide, w), torch.cat([alone, alone, alone[:88]])) else [600]
    columns = x.t().contiguous().t()[:70]  # column-major: another layout, were it a problem of this size
    found += [] if torch.equal(linear(columns, w), alone[:70]) else ["column-major"]
    y = torch.mm(x[:33], w.t(), out=torch.empty(33, n))
    return found + ([] if torch.equal(y, alone[:33]) else ["out="])

with torch.no_grad():
    wait_for(lambda: gemmtuned.generation() >= int(sys.argv[1]))
    found = varies(96, 64)
print(json.dumps([found, gemmtuned.status()]))
"""


# ---- the problem


def test_a_batch_invariant_problem_has_neither_m_nor_the_layout_of_x() -> None:
    assert ASKED == replace(ASKED, m=3) == replace(ASKED, m=2048, layout="tt") == ASKED.with_m(5)
    assert (ASKED.m, str(ASKED)) == (CHAIN_M, "fp32:256x96x64,invariant=1,threads=2")
    assert Problem.parse("fp32:7x96x64,invariant=1,threads=2") == ASKED == Problem.from_rest(ASKED.rest, 9)
    assert ASKED.at(9) == Problem(m=9, n=96, k=64, dtype="fp32", threads=2)
    assert key.problem_of(key.values_of(ASKED)) == ASKED
    assert key.values_of(ASKED) != key.values_of(ASKED.at(CHAIN_M))


@pytest.mark.parametrize("changed", [{"family": "batched", "batch": 2}, {"weight_state": "packed"}])
def test_only_dense_products_with_plain_weights_are_batch_invariant_problems(changed: dict[str, object]) -> None:
    with pytest.raises(ProblemError, match="batch_invariant"):
        Problem(m=1, n=8, k=8, batch_invariant=True, **changed)  # type: ignore[arg-type]


def test_rows_of_other_problems_are_written_as_before() -> None:
    assert "batch_invariant" not in published(ASKED.at(8), "torch_swap").to_row()
    row = published(ASKED, "rows", config=ONE_BY_ONE).to_row()
    assert row["batch_invariant"] is True
    assert Solution.from_row(json.loads(json.dumps(row))).problem == ASKED


# ---- the proof


def _in_order(x: Tensor, w: Tensor, parts: int) -> Tensor:
    """x @ w.T with K cut into parts that are added up one after another, alike for every row."""
    y = torch.zeros(x.shape[0], w.shape[0])
    for xs, ws in zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True):
        y += (xs[:, None] * ws[None]).sum(-1)
    return y


def _other_at_m(x: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return _in_order(x, b.t(), 2 if x.shape[0] == 131 else 1)


def _other_at_77(x: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    y = _in_order(x, b.t(), 1)
    if x.shape[0] == 200:
        y[77:78] = _in_order(x[77:78], b.t(), 2)
    return y


def test_a_kernel_that_adds_up_alike_for_every_row_is_proven() -> None:
    alike = StatelessKernel(lambda x, b, bias: _in_order(x, b.t(), 2))
    assert prove(alike, replace(ASKED, n=4), device=CPU) == 2 * sum(range(1, CHAIN_M + 1))


@pytest.mark.parametrize(("call", "where"), [(_other_at_m, "position 0 of 131"), (_other_at_77, "position 77 of 200")])
def test_another_order_at_one_m_or_one_position_is_found(call, where: str) -> None:
    with pytest.raises(Wrong, match=where):
        prove(StatelessKernel(call), replace(ASKED, n=4), device=CPU)


# ---- the search


def _search(problem: Problem, only: Candidate) -> tuple[list, tuple[Solution, ...]]:
    trials: list = []
    clock = NoisyClock({str(only): 300.0}, jitter=0.01, drift=0.0, burst=0.0, second=0.0)
    found = tune_modes(
        (problem,), "exact", problem, environment(cpu_device()), mode="eager", skip=(), emit=trials.append,
        options=SearchOptions(only=(only,)), clock=clock, seed=1,
    )  # fmt: skip
    return trials, found


def test_the_search_publishes_the_cheapest_proven_kernel_even_where_torch_is_faster() -> None:
    one_by_one = Candidate("rows", ONE_BY_ONE)
    trials, (solution,) = _search(replace(ASKED, n=32, k=32, threads=1), only=one_by_one)
    assert (solution.candidate, solution.covers, solution.state) == (one_by_one, "exact", "published")
    assert (solution.us, solution.baseline_us) == (pytest.approx(300, rel=0.05), pytest.approx(200, rel=0.05))
    told = {(t.phase, t.outcome): t.note for t in trials if t.candidate == one_by_one}
    assert "at every M from 1 to 256" in told["verify", "ok"]
    assert "M=256" in told["confirm", "ok"]


def test_what_is_not_proven_is_not_published(monkeypatch) -> None:
    backend = BACKENDS["rows"]
    monkeypatch.setattr(type(backend), "prepare", lambda *_: StatelessKernel(_other_at_m))  # past the first look
    with pytest.raises(CandidateFailed, match="proven to give a row the same bits"):
        _search(replace(ASKED, n=16, threads=1), only=Candidate("rows", ONE_BY_ONE))


@pytest.mark.parametrize(
    "config",
    ["", "[]", "{}", '{"kernel":"torch","block":0,"grain":1}', '{"kernel":"os","block":8,"grain":8}',
     '{"kernel":"torch","block":8,"grain":3}', '{"kernel":"torch","block":true,"grain":"1"}'],
)  # fmt: skip
def test_a_config_that_is_none_is_refused(config: str) -> None:
    with pytest.raises(CandidateFailed, match="rows"):
        read_rows(config)


# ---- the table


def test_only_what_is_proven_serves_such_problems_and_it_serves_no_others() -> None:
    here = environment(cpu_device())
    wrong = [
        published(ASKED, "torch", state="default_best"), published(ASKED, "torch_swap"), published(ASKED, "cublaslt"),
        published(ASKED.at(8), "rows", config=ONE_BY_ONE),
    ]  # fmt: skip
    right = published(ASKED, "rows", config=ONE_BY_ONE)
    table = build_table([*wrong, right], {"cpu": here}, generation=1, failed=frozenset())
    assert [solution for _, _, solution in table.items()] == [right]
    assert table.refused.total() == len(wrong)
    assert all(table.find(replace(ASKED, m=m)) == ("exact", right) for m in (1, 17, 256, 4096))


@pytest.mark.long
def test_the_native_hook_makes_the_same_blocks_as_the_proof_saw(home: Home) -> None:
    """Bits of the route against those of the backend's own kernel, over block sizes and kernels."""
    configs = [(k, b, g) for k in ("torch", "torch_swap", "onednn") for b, g in ((256, 4), (16, 16), (8, 2), (1, 1))]
    home.path.mkdir()
    rows = [
        published(replace(ASKED, n=32 + i), "rows", config=json.dumps({"kernel": k, "block": b, "grain": g}))
        for i, (k, b, g) in enumerate(configs)
    ]
    publish(home.path / "configs", rows, 1)
    done = home.run(
        """
        import json, torch
        from hooked import wait_for
        import gemmtuned
        from gemmtuned.hooks import activate
        from gemmtuned.kernels.backends import BACKENDS
        torch.set_num_threads(2)
        wait_for(lambda: gemmtuned.generation() == 1)
        hook, bad, hits = activate.current(), [], []
        hook.flusher.stop()
        for _, (problem, _, _), solution in hook.table.items():
            kernel = BACKENDS["rows"].prepare(solution.candidate, problem.at(256))
            x, w = torch.randn(300, 64), torch.randn(problem.n, 64)
            for m in (1, 5, 16, 40, 300):
                with torch.no_grad():
                    y = torch.nn.functional.linear(x[:m], w)
                hook.native.set_switches(0)
                expected = kernel.bind(w.t())(x[:m], None)
                hook.native.set_switches(hook.patches.switches)
                if not torch.equal(y, expected) or y.stride() != expected.stride():
                    bad.append([str(solution.candidate), m])
        hits = sorted({(s.outcome, s.problem.batch_invariant) for s in hook.native.drain()})
        print(json.dumps([bad, hits, len(hook.table)]))
        """,
        GEMMTUNED_BATCH_INVARIANT="1",
    )
    bad, outcomes, count = done.said
    assert (bad, outcomes, count) == ([], [["exact", True]], len(configs))


# ---- programs


@pytest.mark.long
def test_rows_have_the_same_bits_at_every_m_once_captured_tuned_and_served(home: Home) -> None:
    """The whole loop: a program's calls, gemmtuned tune, the table taken up, every M of 1 to 256 in the program."""
    first = home.run(ALL_BATCHES, "0", GEMMTUNED_BATCH_INVARIANT="1")
    assert {problem for problem, _ in home.counts()} == {"fp32:256x96x64,invariant=1,threads=1"}
    assert first.said[1]["note"].startswith("GEMMTUNED_BATCH_INVARIANT: dense products by kernels proven")

    tuned = subprocess.run(
        [sys.executable, "-m", "gemmtuned", "tune", "--json"], env=home.environment(), cwd=HERE, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stderr + tuned.stdout
    second = home.run(ALL_BATCHES, "1", GEMMTUNED_BATCH_INVARIANT="1")
    assert second.said[0] == []
    calls = 256 + 256 + 3
    assert home.counts()["fp32:256x96x64,invariant=1,threads=1", "exact"] == calls, "served by the table, not by torch"


def test_an_engines_mode_counts_such_problems_and_leaves_the_engines_kernels(home: Home) -> None:
    home.path.mkdir()
    asked = replace(ASKED, n=8, k=16)
    publish(home.path / "configs", [published(asked, "rows", config=ONE_BY_ONE)], 1)
    code = """
    import json, os, torch
    from hooked import wait_for
    import gemmtuned
    from gemmtuned.hooks import activate
    torch.set_num_threads(2)
    wait_for(lambda: gemmtuned.generation() == 1)
    hook = activate.current()
    hook.flusher.stop()
    with torch.no_grad():
        torch.nn.functional.linear(torch.randn(4, 16), torch.randn(8, 16))
        torch.bmm(torch.randn(1, 4, 16), torch.randn(1, 16, 8))
    print(json.dumps([sorted([str(s.problem), s.outcome] for s in hook.native.drain()), hook.session().note]))
    """
    engines = home.run(code, VLLM_BATCH_INVARIANT="1").said
    assert [str(asked), "miss"] in engines[0]
    assert "GEMMTUNED_BATCH_INVARIANT=1 has those served" in engines[1]
    ours = home.run(code, VLLM_BATCH_INVARIANT="1", GEMMTUNED_BATCH_INVARIANT="1").said
    assert [str(asked), "exact"] in ours[0]
    free = home.run(code).said
    assert [str(asked.at(4)), "miss"] in free[0], "a program that did not ask is not served from it"


def test_in_such_a_mode_the_free_table_serves_nothing(home: Home) -> None:
    home.path.mkdir()
    free = Problem(m=4, n=8, k=16, dtype="fp32", threads=2)
    batched = replace(free, family="batched", batch=3, layout="nn")
    publish(home.path / "configs", [published(free, "torch_swap"), published(batched, "torch_swap")], 1)
    done = home.run(
        """
        import json, torch
        from hooked import wait_for
        import gemmtuned
        from gemmtuned.hooks import activate
        torch.set_num_threads(2)
        wait_for(lambda: gemmtuned.generation() == 1)
        hook = activate.current()
        hook.flusher.stop()
        with torch.no_grad():
            torch.nn.functional.linear(torch.randn(4, 16), torch.randn(8, 16))
            torch.bmm(torch.randn(3, 4, 16), torch.randn(3, 16, 8))
        print(json.dumps(sorted(s.outcome for s in hook.native.drain())))
        """,
        GEMMTUNED_BATCH_INVARIANT="1",
    )
    assert done.said == ["miss", "miss"]
