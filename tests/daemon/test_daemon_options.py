"""What is asked of a search reaches it: from a request in the foreground, over the wire, to the race and the check."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import planted_kernels as planted
import pytest
import torch
from noise import NoisyClock
from planted_kernels import Planted

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Candidate, Environment, Solution, cpu_device
from gemmtuned.daemon.child.checks import err_ratio
from gemmtuned.daemon.child.search import tune_modes
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Order, Trial, decode, encode
from gemmtuned.daemon.seats import worker
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.worker import Deadlines, Worker
from gemmtuned.daemon.service.main import Tuned, tune_now
from gemmtuned.db.store import Store
from gemmtuned.kernels import backends as registry
from gemmtuned.kernels.backends import BACKENDS

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"
PROBLEM = Problem(m=4, n=16, k=32, dtype="fp32", threads=1)
ALL = SearchOptions(
    backends=("triton", "onednn"), space={"rows": (8, 16), "cache": (".cg",)}, only=(Candidate("triton", '{"a":8}'),),
    iters=20, warmup=0, min_gain=1.05, err_ratio=0.01, atol=1e-2, rtol=0.0,
)  # fmt: skip


# --- what they mean


@pytest.mark.parametrize("options", [SearchOptions(), ALL])
def test_options_come_through_the_wire_as_they_were(options: SearchOptions) -> None:
    order = Order((PROBLEM,), "exact", PROBLEM, "eager", (), options)

    assert decode(encode(order)[4:]) == order


@pytest.mark.parametrize(
    "wrong",
    [
        {"iters": 5},
        {"warmup": -1},
        {"min_gain": 0.5},
        {"err_ratio": 2},
        {"atol": float("nan")},
        {"backends": ("../x",)},
    ],
)
def test_a_value_out_of_range_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong)).removesuffix("s")):
        SearchOptions(**wrong)


def test_a_space_restricts_the_configs_that_have_its_parameters() -> None:
    options = SearchOptions(backends=("triton",), space={"rows": (8, 16)})

    assert options.allows(Candidate.of("triton", rows=8, split=2))
    assert not options.allows(Candidate.of("triton", rows=32, split=2))
    assert options.allows(Candidate.of("triton", split=2))
    assert not options.allows(Candidate("onednn"))
    assert options.allows(Candidate("torch"))
    assert not options.allows(Candidate("triton", "not JSON"))
    assert not options.allows(Candidate("triton", "[1]"))


def test_err_ratio_counts_elements_as_aiter_does() -> None:
    exact = torch.tensor([1.0, 1.0, 0.0, 100.0], dtype=torch.float64)
    y = torch.tensor([1.0, 1.025, 0.009, 99.5])  # 1.025: off by more than 0.01 + 0.01 * 1.025

    assert err_ratio(exact, y) == 0.25
    assert err_ratio(exact, y, atol=0.0) == 0.5
    assert err_ratio(exact, y, atol=0.0, rtol=0.0) == 0.75
    assert err_ratio(exact, torch.full((4,), float("nan"))) == 1.0


# --- in the search


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Torch, and a planted backend `fast` that runs in 150 us instead of 200."""
    found = {"torch": BACKENDS["torch"], "fast": Planted("fast", planted.right)}
    monkeypatch.setattr(registry, "BACKENDS", found)
    monkeypatch.setattr("gemmtuned.daemon.child.search.BACKENDS", found)
    return found


def search(backends: dict[str, object], options: SearchOptions) -> tuple[Solution, list[Trial]]:
    environment = Environment(cpu_device(), dict.fromkeys(backends, "1"))
    trials: list[Trial] = []
    clock = NoisyClock({"fast": 150.0}, jitter=0.01, drift=0.002, burst=0.0, second=0.0)
    solution, *_ = tune_modes(
        (PROBLEM,), "exact", PROBLEM, environment, mode="eager", skip=(), emit=trials.append, options=options,
        clock=clock, seed=1,
    )  # fmt: skip
    return solution, [t for t in trials if t.phase != "start" and t.candidate.backend == "fast"]


def test_iters_is_the_number_of_pairs_in_a_deciding_race(backends: dict[str, object]) -> None:
    solution, trials = search(backends, SearchOptions(iters=17))

    assert solution.backend == "fast"
    assert [t.note.split()[-1] for t in trials if t.phase == "confirm"] == ["pairs=17", "pairs=17"]


def test_a_backend_that_was_not_asked_for_is_not_run(backends: dict[str, object]) -> None:
    assert search(backends, SearchOptions(backends=("other",)))[1] == []
    assert search(backends, SearchOptions(only=()))[1] == []


def test_seeds_are_tried_before_our_own_candidates_and_those_of_libraries_that_are_not_here_never(
    backends: dict[str, object],
) -> None:
    seed = Candidate("fast", '{"tile":64}')
    solution, trials = search(backends, SearchOptions(seeds=(Candidate("asm"), seed, Candidate("torch"))))

    assert [t.candidate for t in trials if t.phase == "screen"] == [seed, Candidate("fast")]
    assert solution.config == "{}"  # a seed wins only if it is the faster
    assert [t.candidate for t in search(backends, SearchOptions(seeds=(seed,), backends=("other",)))[1]] == []


def screened_once(trials: list[Trial]) -> list[Candidate]:
    """In this order; what was as fast as another has been screened again."""
    return list(dict.fromkeys(trial.candidate for trial in trials if trial.phase == "screen"))


def test_seeds_take_the_place_of_the_least_likely_where_there_would_be_too_many(
    backends: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [Candidate("fast", f'{{"tile":{i}}}') for i in range(4)]
    monkeypatch.setattr("gemmtuned.daemon.child.offers.candidates", lambda problem, environment: iter(own))
    monkeypatch.setattr("gemmtuned.daemon.child.offers.MOST", 5)
    seeds = (Candidate("fast", '{"tile":64}'), own[2], Candidate("fast", '{"tile":65}'))

    tried = screened_once(search(backends, SearchOptions(seeds=seeds))[1])

    assert tried == [*seeds, own[0], own[1]], "five in all: the last of ours gave way"


def test_seeds_that_are_among_our_own_or_cannot_be_tried_take_nobodys_place(
    backends: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [Candidate("torch"), *(Candidate("fast", f'{{"tile":{i}}}') for i in range(6))]
    monkeypatch.setattr("gemmtuned.daemon.child.offers.candidates", lambda problem, environment: iter(own))
    monkeypatch.setattr("gemmtuned.daemon.child.offers.MOST", 4)
    seeds = (Candidate("asm"), own[6], Candidate("torch"))

    tried = screened_once(search(backends, SearchOptions(seeds=seeds))[1])

    assert tried == [own[6], own[1], own[2], own[3]]


class Sized(Planted):
    """Compiled candidates that hold so many rows of X."""

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        return problem.m <= int(json.loads(candidate.config)["tokens"])

    def on(self, device: object) -> Sized:
        return self

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes | None]:
        raise AssertionError("nothing wins here")


def test_a_candidate_of_a_bucket_holds_the_rows_of_all_its_members(
    backends: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [replace(PROBLEM, m=m) for m in (5, 6, 16)]
    backends["fast"] = Sized("fast", planted.right)
    monkeypatch.setattr(
        "gemmtuned.daemon.child.offers.candidates",
        lambda problem, environment: iter(Candidate.of("fast", tokens=t) for t in (problem.m, 8 * problem.m)),
    )
    monkeypatch.setattr("gemmtuned.daemon.child.search._compilers.run", lambda *args, **options: {})
    trials: list[Trial] = []
    with contextlib.suppress(AssertionError):
        tune_modes(
            tuple(sizes), "bucket", sizes[-1], Environment(cpu_device(), dict.fromkeys(backends, "1")), mode="eager",
            skip=(), emit=trials.append, clock=NoisyClock({"fast": 150.0}), seed=1,
        )  # fmt: skip

    tried = dict.fromkeys(t.candidate for t in trials if t.candidate.backend == "fast")
    assert [json.loads(c.config)["tokens"] for c in tried] == [16, 48, 128]


def test_a_gain_below_the_one_asked_for_is_none(backends: dict[str, object]) -> None:
    assert search(backends, SearchOptions(min_gain=1.2))[0].backend == "fast"
    assert search(backends, SearchOptions(min_gain=1.5))[0].backend == "torch"


def test_a_result_outside_the_tolerance_asked_for_is_rejected_and_its_share_is_told(
    backends: dict[str, object],
) -> None:
    solution, trials = search(backends, SearchOptions(err_ratio=0.0, atol=0.0, rtol=0.0))

    assert solution.backend == "torch"
    assert [(t.phase, t.outcome) for t in trials] == [("screen", "ok"), ("verify", "rejected")]
    assert "0 was asked for" in trials[-1].note
    usual = search(backends, SearchOptions(err_ratio=0.0))
    assert usual[0].backend == "fast"
    assert next(t.err_ratio for t in usual[1] if t.phase == "verify") == 0.0


# --- in a run in the foreground


class Run:
    """A home, and foreground runs in it with the planted search."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(folder), "GEMMTUNED_IDLE_S": "0"})
        self.store = Store(self.settings.db, locks=self.settings.locks)

    def __call__(self, *sizes: int, timeout_s: float | None = None, **asked: object) -> tuple[Tuned, Request]:
        problems = [Problem(m=8, n=n, k=64) for n in sizes]
        request = Request(problems=problems, timeout_s=timeout_s, **asked)
        deadlines = Deadlines(timeout_s=timeout_s)
        done = tune_now(
            request, self.settings, make_worker=lambda d: Worker(d, nice=0, search=SEARCH, deadlines=deadlines)
        )
        return done, request


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.store.close()


ODD = {
    "scaled:i8>bf16:8x40x64,scale=row,weight=shuffled,threads=1": "N a multiple of 16 and K of 32",
    "scaled:fp8_e4m3>bf16:8x48x80,scale=row,weight=shuffled,threads=1": "N a multiple of 16 and K of 32",
    "weight_only:bf16/i4:8x40x500,wscale=1x32,wscaledtype=fp32,threads=1": "32 values have one scale, and K is no",
}


def test_sizes_that_fit_no_such_weight_are_refused_by_name_and_not_tried(run: Run) -> None:
    odd, good = [Problem.parse(text) for text in ODD], Problem(m=8, n=64, k=64)

    done = tune_now(
        Request(problems=[*odd, good]), run.settings, make_worker=lambda d: Worker(d, nice=0, search=SEARCH)
    )

    assert list(done.solutions) == [good] and list(done.failed) == odd
    for why, (_, said) in zip(done.failed.values(), ODD.items(), strict=True):
        assert why.startswith("this version cannot tune it: ") and said in why
    assert not [row for row in run.store.resume.waiting(now_s=time.time()) if row["problems"] > 0]


def test_a_run_of_none_but_such_problems_starts_no_worker(run: Run) -> None:
    odd = [Problem.parse(text) for text in ODD]
    assert list(tune_now(Request(problems=odd), run.settings, monitors=[]).failed) == odd


def test_a_verdict_is_told_when_the_store_holds_it(run: Run) -> None:
    held: list[int] = []
    trials: list[Trial] = []

    def look(found: object, device: object) -> None:
        held.append(len(run.store.solutions.published()[1]))

    done, _ = run(8, 9, on_found=look, on_trial=lambda trial, device: trials.append(trial))

    assert held == [1, 2]
    assert len(done.solutions) == 2
    assert {(t.candidate.backend, t.outcome) for t in trials} == {
        ("torch", "ok"), ("fast", "ok"), ("slow", "slower"), ("bad", "slower"),
    }  # fmt: skip


def test_what_has_a_verdict_is_tuned_anew_only_when_asked_again(run: Run) -> None:
    run(8)
    before = run.store.solutions.generation()

    again, quiet = run(8)
    assert (run.store.solutions.generation(), quiet.found) == (before, {})
    assert len(again.solutions) == 1

    done, request = run(8, 9, again=True)
    assert run.store.solutions.generation() == before + 2
    assert len(request.found) == len(done.solutions) == 2


def test_the_default_as_best_of_a_few_is_told_but_is_no_verdict_for_all(run: Run) -> None:
    few = SearchOptions(backends=("slow",))

    done, _ = run(8, options=few)
    assert [s.state for s in done.solutions.values()] == ["default_best"]
    assert done.unpublished == set(done.solutions)
    assert run.store.solutions.published()[1] == []

    assert [s.backend for s in run(8)[0].solutions.values()] == ["fast"]
    run(8, options=few, again=True)
    assert [s.backend for s in run.store.solutions.published()[1]] == ["fast"]


def test_a_tolerance_makes_no_verdict_preliminary_unless_it_rejects_something(run: Run) -> None:
    _, strict = run(8, options=SearchOptions(err_ratio=0.05))
    assert len(run.store.solutions.published()[1]) == 1

    strict.rejected.add(strict.problems[0])
    assert strict.left_out(strict.problems) and not strict.left_out([Problem(m=9, n=8, k=64)])


def test_a_candidate_too_slow_for_this_run_may_be_tried_in_the_next(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PAUSES_S", 1.0)  # of nine, which a search may wait for by itself
    began = time.monotonic()
    done, request = run(13, timeout_s=0.5)  # `bad` hangs

    assert time.monotonic() - began > 1.5, "it has its time and the pauses"
    assert [s.backend for s in done.solutions.values()] == ["fast"]
    assert {candidate.backend for _, candidate in request.too_slow} == {"bad"}
    assert run.store.trials.failed_candidates(Problem(m=8, n=13, k=64), done_environment()) == set()


def done_environment() -> Environment:
    from planted_search import ENVIRONMENT

    return ENVIRONMENT
