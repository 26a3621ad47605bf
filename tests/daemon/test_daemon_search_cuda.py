"""The search on a GPU with planted times: graphs, host time, places of operands, a slow device."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LAUNCH
from listed_graphs import ListedGraphs
from planted_kernels import Planted, right

from gemmtuned.configs.errors import CandidateFailed, TryLater
from gemmtuned.configs.manifest import read_binary
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.daemon.child import arms as arms_module
from gemmtuned.daemon.child import last_check, measure, screening, search
from gemmtuned.daemon.child import races as races_module
from gemmtuned.daemon.child.measure import Arm, Bench
from gemmtuned.daemon.child.measure_cuda import GraphClock
from gemmtuned.daemon.child.search import tune_modes
from gemmtuned.daemon.protocol.options import DEFAULTS, SearchOptions
from gemmtuned.daemon.seats.worker import _PAUSES_S
from gemmtuned.kernels import backends as registry
from gemmtuned.kernels.backends import BACKENDS

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
PROBLEM = Problem(m=4, n=16, k=32, dtype="fp32")


def arm(name: str = "a", copies: int = 5, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Arm:
    return Arm(name, [lambda: torch.full((2, 3), value, dtype=dtype) for _ in range(copies)])


class Compiled(Planted):
    """A planted backend whose solutions are binaries."""

    binary = b"a kernel"

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        return True

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        if self.binary == b"":
            raise CandidateFailed("no such tile")
        return json.dumps({**LAUNCH, "binary": sha256(self.binary).hexdigest(), "max_m": problem.m}), self.binary


class PlantedClock(GraphClock):
    """Device times, and host times, by arm name."""

    def __init__(self, us: dict[str, float], host: dict[str, float]) -> None:
        super().__init__(ListedGraphs())
        self.times, self.host = us, host
        self.spoilt = ""

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        assert isinstance(self._graphs, ListedGraphs)
        self._graphs.skips = arm.name == self.spoilt
        super().us(arm, copies)
        return self.times.get(arm.name, 20.0)

    def host_us(self, arm: Arm, *, blocks: int = 15, calls: int = 16) -> float:
        return self.host.get(arm.name, 10.0)


class Table:
    def __init__(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        self.home = home
        self.backends: dict[str, Any] = {"torch": BACKENDS["torch"]}
        self.compiled: list[Candidate] = []
        self.refused: dict[Candidate, str] = {}
        self.told: list[Any] = []
        patch.setenv("GEMMTUNED_HOME", str(home))
        patch.setattr(registry, "BACKENDS", self.backends)
        patch.setattr(search, "BACKENDS", self.backends)
        patch.setattr(search, "_compilers", self)
        patch.setattr(races_module, "REST_S", 0.0)
        patch.setattr(last_check, "OFTEN_S", 0.02)
        patch.setattr(last_check, "check_threads", lambda *a: None)  # for CPUs, which this is in truth
        patch.setattr(search, "torch_device", lambda device: torch.device("cpu"))

    def run(self, candidates: Sequence[Candidate], problem: Problem, device: Device, *, before: Any) -> Any:
        """In place of the compiling processes."""
        assert device == H200
        self.compiled += candidates
        return self.refused

    def tune(self, us: dict[str, float], host: dict[str, float] | None = None, **more: Any) -> dict[str, Solution]:
        environment = Environment(H200, dict.fromkeys(self.backends, "1"))
        asked: dict[str, Any] = {"members": (PROBLEM,), "covers": "exact", "target": PROBLEM, **more}
        found = tune_modes(
            asked["members"], asked["covers"], asked["target"], environment, mode="eager", skip=(),
            emit=more.get("emit", self.told.append), clock=more.get("clock", PlantedClock(us, host or {})), seed=1,
            options=more.get("options", DEFAULTS),
        )  # fmt: skip
        assert found[0].mode == "eager"
        return {solution.mode: Solution.from_row(solution.to_row()) for solution in found}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Table:
    return Table(monkeypatch, tmp_path)


def test_a_compiled_winner_is_published_for_both_modes_with_its_binary_in_place(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)

    found = table.tune({"triton": 15.0}, {"triton": 1000.0})  # from Python; the hook launches it without

    assert table.compiled == [Candidate("triton")]
    assert {s.mode: (s.backend, s.state, s.us, s.baseline_us) for s in found.values()} == {
        "eager": ("triton", "published", 15.0, 20.0),
        "graph": ("triton", "published", 15.0, 20.0),
    }
    launch = json.loads(found["graph"].launch)
    assert found["eager"].launch == found["graph"].launch and launch["max_m"] == PROBLEM.m
    assert read_binary(table.home, launch["binary"]) == b"a kernel"


def test_the_launch_record_serves_the_whole_bucket(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)

    found = table.tune(
        {"triton": 15.0}, members=tuple(PROBLEM.with_m(m) for m in (1, 4, 13)), covers="fine", target=PROBLEM.with_m(16)
    )

    assert json.loads(found["eager"].launch)["max_m"] == 16


def test_what_is_not_compiled_must_win_with_its_host_time_in_eager_calls(table: Table) -> None:
    table.backends["swap"] = Planted("swap", right)

    cheap = table.tune({"swap": 15.0}, {"swap": 11.0})
    dear = table.tune({"swap": 15.0}, {"swap": 16.0})

    assert {mode: s.state for mode, s in cheap.items()} == {"eager": "published", "graph": "published"}
    assert {mode: s.state for mode, s in dear.items()} == {"eager": "default_best", "graph": "published"}


def test_that_the_default_is_best_is_said_for_both_modes(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)

    found = table.tune({"triton": 25.0})

    assert {mode: (s.backend, s.state, s.launch) for mode, s in found.items()} == {
        "eager": ("torch", "default_best", ""),
        "graph": ("torch", "default_best", ""),
    }


def test_what_its_compiler_refused_is_told_and_never_loaded(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)
    table.refused = {Candidate("triton"): "it spills"}

    found = table.tune({"triton": 15.0})

    assert found["graph"].state == "default_best"
    assert table.backends["triton"].prepared == 0
    assert [(t.phase, t.outcome, t.note) for t in table.told if t.candidate.backend == "triton"] == [
        ("screen", "refused", "it spills")
    ]


class Places:
    """Where a search lays operands, `room` places at most, and a clock by which triton's time depends on the place."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.weights: list[set[int]] = []  # their addresses, by place
        self.held: list[int] = []  # how many earlier places were in memory still when this one was taken
        self._made: list[weakref.ref[Bench]] = []
        self._of: dict[int, int] = {}  # {id of an arm: its place}
        places = self

        class Placed(Bench):
            def __init__(self, *args: Any) -> None:
                if len(places.weights) == room:
                    raise RuntimeError("out of memory")
                super().__init__(*args)
                places.held.append(sum(one() is not None for one in places._made))
                places.weights.append({t.data_ptr() for weights in self.weights for t in weights})
                places._made.append(weakref.ref(self))

            def arm(self, *args: Any) -> Arm:
                found = super().arm(*args)
                places._of[id(found)] = next(i for i, one in enumerate(places._made) if one() is self)
                return found

        patch.setattr(arms_module, "Bench", Placed)

    def clock(self, at: Sequence[float]) -> PlantedClock:
        of = self._of

        class ByPlace(PlantedClock):
            def us(self, arm: Arm, copies: Sequence[int]) -> float:
                us = super().us(arm, copies)
                return at[of[id(arm)]] if arm.name == "triton" else us

        return ByPlace({}, {})


@pytest.mark.parametrize(
    ("room", "at", "races", "state"),
    [
        (9, (15.0, 25.0), ["ok", "slower"], "default_best"),
        (1, (15.0,), ["ok", "ok"], "published"),  # the second race is run where there is no room, too
        (9, (15.0, 18.0), ["ok", "ok"], "published"),  # 20 / 18 is sure
        (9, (19.0, 19.0, 25.0), ["ok", "ok", "slower"], "default_best"),
        (9, (15.0, 19.0, 25.0), ["ok", "ok", "slower"], "default_best"),  # the worst bound is what is not sure
        (9, (19.0, 18.5, 18.8), ["ok", "ok", "ok"], "published"),
        (2, (19.0, 19.0), ["ok", "ok", "ok"], "published"),  # no room: where the second was
        (1, (19.0,), ["ok", "ok", "ok"], "published"),
    ],
)
def test_races_that_decide_have_operands_of_their_own_and_a_small_gain_must_win_at_three_places(
    table: Table, monkeypatch: pytest.MonkeyPatch, room: int, at: Sequence[float], races: list[str], state: str
) -> None:
    table.backends["triton"] = Compiled("triton", right)
    places = Places(monkeypatch, room)

    found = table.tune({}, clock=places.clock(at))["graph"]

    confirmed = [t for t in table.told if t.phase == "confirm"]
    assert [t.outcome for t in confirmed] == races
    assert [t.note.split()[0] for t in confirmed] == [f"race={i + 1}" for i in range(len(races))]
    assert found.state == state
    assert found.gain_low == (pytest.approx(20.0 / max(at)) if state == "published" else 1.0)
    assert places.held == list(range(len(at)))
    assert len(set.union(*places.weights)) == sum(map(len, places.weights))


def test_a_winner_without_a_binary_is_not_published(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.backends["triton"] = Compiled("triton", right)
    monkeypatch.setattr(Compiled, "binary", b"")

    found = table.tune({"triton": 15.0})

    assert found["eager"].state == "default_best"
    assert (table.told[-1].phase, table.told[-1].outcome) == ("confirm", "refused")


def test_a_kernel_that_goes_wrong_in_graphs_loses_its_race_as_wrong(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)
    clock = PlantedClock({"triton": 15.0}, {})

    def spoil(told: Any) -> None:
        table.told.append(told)
        if told.phase == "verify":  # memory that its graph needs is given to others from here on
            clock.spoilt = "triton"

    found = table.tune({}, clock=clock, emit=spoil)

    assert found["graph"].state == "default_best"
    last = table.told[-1]
    assert (last.phase, last.outcome) == ("confirm", "wrong") and "inside a CUDA graph" in last.note


def test_a_race_on_a_slowed_device_is_run_again_and_the_clock_stands_in_the_trial(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.backends["triton"] = Compiled("triton", right)
    monkeypatch.setattr(races_module, "COOL_S", 0.0)
    clock = PlantedClock({"triton": 15.0}, {})
    graphs: Any = clock._graphs
    graphs.conditions = [(900, 0x20), (1200, 0x4 | 0x40), (1755, 0x4), (None, None)]

    assert table.tune({}, clock=clock)["graph"].state == "published"
    notes = [t.note for t in table.told if t.phase == "confirm" and t.outcome == "ok"]
    assert notes[0].endswith(" sm_mhz=1755") and "sm_mhz" not in notes[1]


def test_on_a_device_that_stays_slowed_no_verdict_is_given_and_nobody_is_blamed(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.backends["triton"] = Compiled("triton", right)
    monkeypatch.setattr(races_module, "COOL_S", 0.0)
    clock = PlantedClock({"triton": 15.0}, {})
    graphs: Any = clock._graphs
    graphs.conditions = [(900, 0x20 | 0x80)] * 3

    with pytest.raises(TryLater, match="thermal limit, power brake"):
        table.tune({}, clock=clock)
    assert {t.outcome for t in table.told} == {"ok"}


def test_a_disk_that_refuses_the_winners_binary_gives_no_verdict(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)
    (table.home / "bin").write_text("in the way")

    with pytest.raises(TryLater, match="cannot keep a binary"):
        table.tune({"triton": 15.0})


class Loaded(PlantedClock):
    """triton's time by what the device did before: was left alone, was kept busy, or neither."""

    def __init__(self, plain: float, rested: float, busy: float) -> None:
        super().__init__({"triton": plain}, {})
        self.pauses: list[float] = []
        self._rested, self._busy = rested, busy

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.times["triton"] = self._rested

    def keep_busy(self, arms: Sequence[Arm], seconds: float) -> None:
        super().keep_busy(arms, seconds)
        self.times["triton"] = self._busy


@pytest.mark.parametrize(
    ("us", "races"),
    [
        ((19.0, 19.0, 19.0), ["race=1 ok", "race=2 rested ok", "race=3 busy ok"]),
        ((19.0, 19.0, 19.8), ["race=1 ok", "race=2 rested ok", "race=3 busy slower"]),
        ((19.0, 21.0, 19.0), ["race=1 ok", "race=2 rested slower"]),
        ((15.0, 15.0, 25.0), ["race=1 ok", "race=2 rested ok"]),  # that sure of it nobody asks for more
    ],
)
def test_a_winner_must_win_on_a_rested_gpu_and_one_with_a_small_gain_on_a_busy_one_too(
    table: Table, us: tuple[float, float, float], races: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table.backends["triton"] = Compiled("triton", right)
    clock = Loaded(*us)
    monkeypatch.setattr(races_module, "REST_S", 1.5)
    monkeypatch.setattr(races_module.time, "sleep", clock.sleep)

    found = table.tune({}, clock=clock)

    confirmed = [t for t in table.told if t.phase == "confirm"]
    assert [f"{t.note.split(' m=')[0]} {t.outcome}" for t in confirmed] == races
    assert found["graph"].state == ("published" if races[-1].endswith("ok") else "default_best")
    assert [s for s in clock.pauses if s != last_check.PAUSE_S] == [1.5]  # the rest; the last check pauses, too
    graphs: Any = clock._graphs
    assert graphs.kept_busy == ([(2, races_module.BUSY_S)] if "busy" in races[-1] else [])


@pytest.mark.parametrize(("min_gain", "races"), [(1.02, 2), (1.2, 3)])
def test_what_is_sure_is_more_where_more_gain_is_asked_for(table: Table, min_gain: float, races: int) -> None:
    table.backends["triton"] = Compiled("triton", right)

    table.tune({}, clock=Loaded(16.0, 16.0, 16.0), options=SearchOptions(min_gain=min_gain))

    assert len([t for t in table.told if t.phase == "confirm"]) == races


def test_a_rested_race_is_short_however_many_pairs_are_asked_for(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)

    table.tune({}, clock=Loaded(19.0, 19.0, 19.0), options=SearchOptions(iters=200))

    pairs = [int(t.note.split("pairs=")[1].split()[0]) for t in table.told if t.phase == "confirm"]
    assert pairs[0] == pairs[2] == 200 and pairs[1] < 60


def test_without_room_for_graphs_a_race_is_run_at_the_place_before(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.backends["triton"] = Compiled("triton", right)
    places = Places(monkeypatch, 9)
    clock = places.clock((19.0, 18.9, 18.8))
    record = clock._record

    def full(arm: Arm) -> Any:
        if places._of[id(arm)] == 2:
            raise RuntimeError("CUDA out of memory")
        return record(arm)

    monkeypatch.setattr(clock, "_record", full)

    found = table.tune({}, clock=clock)["graph"]

    races = [t.note.split(" m=")[0] for t in table.told if t.phase == "confirm"]
    assert races == ["race=1", "race=2 rested", "race=3 busy"] and found.state == "published"


def test_a_place_with_fewer_copies_of_the_weights_is_not_taken(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.backends["triton"] = Compiled("triton", right)
    places = Places(monkeypatch, 9)
    full = measure.copies_needed
    monkeypatch.setattr(measure, "copies_needed", lambda *asked: full(*asked) - (len(places.weights) > 0))

    table.tune({}, clock=places.clock((19.0, 25.0, 25.0)))

    assert [t.outcome for t in table.told if t.phase == "confirm"] == ["ok"] * 3


def test_a_candidates_timeout_leaves_room_for_every_pause_of_a_race() -> None:
    assert 3 * max(races_module.REST_S, races_module.BUSY_S) + 2 * races_module.COOL_S < _PAUSES_S


def test_where_the_best_does_not_win_again_the_next_best_may(table: Table) -> None:
    table.backends |= {"triton": Compiled("triton", right), "other": Compiled("other", right)}
    clock = Loaded(16.0, 16.0, 16.0)
    clock.times["other"] = 18.0
    clock.keep_busy = lambda arms, seconds: None  # type: ignore[method-assign]

    def tire(told: Any) -> None:
        table.told.append(told)
        if told.phase == "confirm" and told.candidate.backend == "triton":
            clock.times["triton"] = 25.0

    found = table.tune({}, clock=clock, emit=tire)

    assert (found["graph"].backend, found["graph"].state) == ("other", "published")
    races = [(t.candidate.backend, t.note[:6], t.outcome) for t in table.told if t.phase == "confirm"]
    assert races[-2:] == [("triton", "race=2", "slower"), ("other", "race=2", "ok")]


def test_a_reading_is_of_many_calls_and_counts_as_long_as_it_takes(table: Table) -> None:
    table.backends["triton"] = Compiled("triton", right)
    clock = PlantedClock({"triton": 18.0, "torch": 20.0}, {})

    table.tune({}, clock=clock)

    pairs = [int(t.note.split("pairs=")[1].split()[0]) for t in table.told if t.phase == "confirm"]
    reading_s = 20e-6 * clock.launches(clock_arm(clock, "torch"))
    assert pairs[0] == max(6, int(races_module.RACE_S / (2 * reading_s))) and pairs[1] < pairs[0] < 60


def clock_arm(clock: GraphClock, name: str) -> Arm:
    return next(one.arm for one in clock._recorded.values() if one.arm.name.startswith(name))


def test_what_screens_close_together_is_screened_again(table: Table) -> None:
    for i in range(5):
        table.backends[f"b{i}"] = Compiled(f"b{i}", right)

    table.tune({f"b{i}": (15.0 if i < 4 else 19.0) for i in range(5)})

    again = {trial.candidate.backend for trial in table.told if trial.phase == "screen" and "of two" in trial.note}
    assert again == {"b0", "b1", "b2", "b3"}
    assert len({trial.candidate for trial in table.told if trial.phase == "verify"}) == screening.FINALISTS
