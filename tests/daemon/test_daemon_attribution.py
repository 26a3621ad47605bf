"""Whose use of a GPU is it?  What drivers say, in and outside of containers, against what is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_gpu import CONTEXT, MIB, Card, FakeSampler
from planted_card import VIEWS, WORKER, Scene

from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.gpus import GpuMonitor
from gemmtuned.daemon.device.idle import idleness_of, must_yield
from gemmtuned.daemon.device.neighbours import Neighbours


@pytest.fixture(params=[(view, by_pid) for view in VIEWS for by_pid in (True, False)], ids=str)
def card(request: pytest.FixtureRequest) -> Iterator[Card]:
    view, by_pid = request.param
    yield Card(view=view, by_pid=by_pid, counts=by_pid)


def busy(seen: list[tuple[float | None, str]]) -> bool:
    return any(others is None or others > 0 for others, _ in seen)


def test_our_own_worker_is_never_taken_for_others(card: Card) -> None:
    scene = Scene(card)
    assert not busy(scene.watch(1.0))
    ours = scene.begin()
    assert not busy(scene.work(ours, 900 * MIB, 3.0))
    assert not busy(scene.work(ours, 6000 * MIB, 3.0))
    assert not busy(scene.work(ours, 200 * MIB, 3.0))
    ours.held += 200 * MIB  # modules loaded late
    assert not busy(scene.watch(2.0))


@pytest.mark.parametrize("view", VIEWS)
def test_a_context_that_looked_small_once_does_not_shut_the_gpu_to_all_later_workers(view: str) -> None:
    """Seen on an H200: every worker after that one was taken for somebody else as soon as it loaded its kernels."""
    scene = Scene(Card(view=view, by_pid=False), share=True, neighbours=lambda least, elsewhere: "")
    server = scene.card.start(9999, held=5000 * MIB)
    scene.watch(1.0)
    for start in range(3):
        scene.own = OwnUse(WORKER)
        scene.watch(1.0)
        ours = scene.card.start(WORKER)
        if start == 0:
            server.held -= 600 * MIB  # the loaded program gives memory back while our worker starts
        scene.watch(0.1)
        scene.own = OwnUse(WORKER, 24 * MIB)
        ours.held += 24 * MIB
        assert not busy(scene.watch(0.7))
        assert not busy(scene.work(ours, 900 * MIB, 2.0))
        ours.held += 300 * MIB  # modules
        assert not busy(scene.watch(1.0))
        scene.own = None
        scene.card.end(ours)
        scene.watch(2.5)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("by_pid", [False, True])
def test_who_comes_while_our_worker_imports_is_not_taken_for_our_worker(by_pid: bool, counts: bool) -> None:
    scene = Scene(Card(view="all", by_pid=by_pid, counts=counts))
    scene.watch(1.0)
    scene.own = OwnUse(WORKER)
    scene.watch(0.5)
    scene.card.start(9999, held=500 * MIB, share=0.8)
    scene.watch(2.0)
    scene.card.start(WORKER)
    assert busy(scene.watch(0.2))
    scene.own = OwnUse(WORKER, 24 * MIB)
    seen = scene.watch(0.2)
    assert busy(seen) and "9999" in seen[-1][1]


def test_our_own_worker_is_not_taken_for_others_after_it_has_ended(card: Card) -> None:
    scene = Scene(card)
    scene.watch(1.0)
    ours = scene.begin()
    scene.work(ours, 900 * MIB, 2.0)
    scene.own, ours.held = None, 40 * MIB  # the driver takes a moment to clean up, and its average a second
    assert not busy(scene.watch(1.0))
    card.end(ours)
    assert not busy(scene.watch(3.0))


def test_memory_of_a_dead_worker_is_waited_for_and_then_missed(card: Card) -> None:
    scene = Scene(card)
    scene.watch(1.0)
    ours = scene.begin()
    scene.work(ours, 6000 * MIB, 1.0)
    scene.own = None
    assert not busy(scene.watch(0.9))
    seen = scene.watch(0.6)
    assert seen[-1] == (None, "the memory of our own worker is not back yet")
    card.end(ours)
    assert not busy(scene.watch(3.0))


def test_a_new_worker_after_a_crash_is_ours_as_well(card: Card) -> None:
    scene = Scene(card)
    scene.watch(1.0)
    scene.work(scene.begin(), 900 * MIB, 2.0)
    card.programs.clear()
    scene.own = None
    scene.watch(0.3)
    assert not busy(scene.work(scene.begin(), 900 * MIB, 3.0))


@pytest.mark.parametrize("tensors", [0, 900 * MIB])
def test_a_program_that_comes_while_we_tune_is_seen_in_time(card: Card, tensors: int) -> None:
    scene = Scene(card)
    scene.watch(1.0)
    ours = scene.begin()
    scene.work(ours, tensors, 2.0)
    card.start(9999, share=0.5)
    assert busy(scene.watch(0.3))


def test_a_program_that_comes_while_our_worker_starts_is_seen(card: Card) -> None:
    scene = Scene(card)
    scene.watch(1.0)
    scene.own = OwnUse(WORKER)
    scene.watch(1.0)
    card.start(9999, held=3 * CONTEXT)
    assert busy(scene.watch(0.4))


def test_a_small_program_that_uses_next_to_nothing_is_somebody(card: Card) -> None:
    """A thousand tiny kernels a second are less than 1 % and show as 0."""
    card.start(9999, held=250 * MIB, share=0.0)
    assert Scene(card).watch(0.1)[0][0] is None
    assert Scene(card, share=True, neighbours=lambda least, elsewhere: "it works").watch(0.1)[0][0] == 1.0


def test_memory_that_is_not_ours_means_somebody_is_there(card: Card) -> None:
    card.start(9999, held=20_000 * MIB)
    scene = Scene(card)
    others, why = scene.watch(0.1)[0]
    assert others is None and "20004 MiB" in why and "--share-resident" in why


def test_a_quiet_loaded_program_is_tuned_beside_when_its_work_would_be_seen(card: Card) -> None:
    """By the driver where it names processes, else by CPU time of who holds the GPU; else not at all."""
    working = []
    server = card.start(9999, held=20_000 * MIB)
    scene = Scene(card, share=True, neighbours=lambda least, elsewhere: "it works" if working else "")
    assert not busy(scene.watch(1.0))
    ours = scene.begin()
    assert not busy(scene.work(ours, 900 * MIB, 3.0))
    server.share = 0.4
    working.append(1)
    assert busy(scene.watch(0.3))


def beside_a_quiet_program() -> tuple[Scene, Any]:
    """Our worker at work, and the program that was there before it."""
    card = Card()
    program = card.start(9999, held=2000 * MIB)
    scene = Scene(card, share=True, neighbours=lambda least, elsewhere: "")
    scene.watch(1.0)
    scene.work(scene.begin(), 900 * MIB, 1.0)
    return scene, program


def test_a_program_that_takes_up_a_publish_does_not_end_the_tuning_and_one_that_goes_on_does() -> None:
    """It loads its new kernels: a per cent or two, as an H200 showed it for a second after each publish."""
    scene, program = beside_a_quiet_program()
    for _ in range(3):
        program.share, program.held = 0.02, program.held + 18 * MIB
        assert not busy(scene.watch(1.2))
        program.share = 0.0
        assert not busy(scene.watch(1.0))
    program.share = 0.02
    assert busy(scene.watch(3.0))
    program.share = 0.0
    scene.watch(0.5)
    program.share = 0.06
    assert busy(scene.watch(0.2))


def test_publishes_that_follow_each_other_do_not_look_like_work_for_ten_seconds() -> None:
    scene, program = beside_a_quiet_program()
    program.share = 0.02
    seen = []
    for _ in range(8):
        scene.own = OwnUse(WORKER, 900 * MIB, working=True, published_s=scene.now_s)
        seen += scene.watch(1.4)
    assert not busy(seen[:95]) and busy(seen[105:])


@pytest.mark.parametrize(("share", "excused"), [(0.06, True), (0.12, False)])
def test_more_of_the_gpu_is_excused_just_after_a_publish(share: float, excused: bool) -> None:
    """Seen on an H200: 5 % after five publishes in five seconds cost 13 s."""
    scene, program = beside_a_quiet_program()
    scene.own = OwnUse(WORKER, 900 * MIB, working=True, published_s=scene.now_s)
    program.share = share
    assert busy(scene.watch(1.0)) is not excused
    program.share = 0.0
    scene.watch(2.0)
    program.share = 0.06
    assert busy(scene.watch(0.2)), "no longer about us"


def test_beside_a_loaded_program_that_cannot_be_watched_nothing_is_tuned() -> None:
    card = Card(view="none")
    card.start(9999, held=20_000 * MIB)
    blind = {"none": Scene(card, share=True), "unnamed": Scene(Card(view="all", by_pid=False), share=True)}
    blind["unnamed"].card.start(9999, held=20_000 * MIB)
    for scene in blind.values():
        others, why = scene.watch(0.1)[0]
        assert others is None and "nobody here can say" in why


def test_who_comes_after_a_loaded_program_has_left_cannot_hide_in_its_memory() -> None:
    card = Card(view="none")
    server = card.start(9999, held=20_000 * MIB)
    scene = Scene(card, share=True, neighbours=lambda least, elsewhere: "")
    scene.watch(1.0)
    ours = scene.begin()
    scene.work(ours, 6000 * MIB, 1.0)
    card.end(server)
    assert not busy(scene.watch(4.0))
    assert not busy(scene.work(ours, 200 * MIB, 3.0))
    assert not busy(scene.work(ours, 6000 * MIB, 3.0))
    card.start(9998, held=2000 * MIB)
    assert busy(scene.watch(0.4))


def test_a_loaded_program_that_takes_more_memory_has_begun_to_work() -> None:
    card = Card(view="none")
    server = card.start(9999, held=20_000 * MIB)
    scene = Scene(card, share=True, neighbours=lambda least, elsewhere: "")
    scene.watch(1.0)
    scene.work(scene.begin(), 900 * MIB, 1.0)
    server.held += 2000 * MIB
    seen = scene.watch(0.3)
    assert busy(seen) and "others took" in seen[-1][1]


def test_utilisation_at_our_workers_rest_is_that_of_others(card: Card) -> None:
    server = card.start(9999, held=500 * MIB)
    scene = Scene(card, share=True, neighbours=lambda least, elsewhere: "")
    scene.watch(1.0)
    ours = scene.begin()
    scene.work(ours, 0, 1.0)
    ours.share = 0.0
    scene.own = OwnUse(WORKER, 0)
    scene.watch(1.5)
    server.share = 0.2
    assert busy(scene.watch(0.2))


@pytest.mark.parametrize("name", ["util", "used_bytes"])
def test_what_the_driver_does_not_say_is_busy(name: str) -> None:
    scene = Scene(Card(more={name: None}))
    assert scene.watch(0.1)[0][0] is None


@pytest.mark.parametrize(
    ("facts", "mps", "words"),
    [
        ({"mig": True}, False, "MIG"),
        ({"compute_mode": 3}, False, "exclusive mode"),
        ({"compute_mode": 2}, False, "prohibited mode"),
        ({}, True, "MPS"),
    ],
)
def test_modes_in_which_we_must_stay_away(facts: dict[str, Any], mps: bool, words: str) -> None:
    card = Card(more=facts)
    monitor = GpuMonitor(FakeSampler(card), card.facts(), mps=lambda: mps)  # type: ignore[arg-type]
    readings = [monitor.read(1000.0 + i / 10) for i in range(20)]
    verdict = idleness_of(readings, now_s=1001.9, window_s=1.0, limits=monitor.limits)
    assert verdict.state == "busy" and words in verdict.reason
    assert words in must_yield(readings, now_s=1001.9, limits=monitor.limits)


@pytest.mark.part(6)
@pytest.mark.parametrize("told_by", ["samples", "processes", "cpu"])
@pytest.mark.parametrize("hertz", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("sample_s", [1 / 6, 1.0])
def test_bursts_never_start_tuning(told_by: str, hertz: float, sample_s: float) -> None:
    """50 ms of work, looked at twice a second as the daemon does while it waits.

    utilisation is that of the driver's last whole sample, so most bursts fall between two looks; what tells
    of them is the samples kept by the driver, its figures by process, or the CPU time of who holds the GPU.
    """
    card = Card(view="all" if told_by == "processes" else "none")
    server = card.start(9999, held=400 * MIB)
    now_s = 1000.0

    def used(since_s: float, until_s: float) -> float:
        """Seconds of work between the two: bursts begin at multiples of 1 / hertz."""
        first, last = int(since_s * hertz) - 1, int(until_s * hertz) + 1
        spans = ((n / hertz, n / hertz + 0.05) for n in range(first, last + 1))
        return sum(max(min(end, until_s) - max(begin, since_s), 0.0) for begin, end in spans)

    def sample(back: int) -> float:
        end_s = (int(now_s / sample_s) - back) * sample_s
        return used(end_s - sample_s, end_s) / sample_s

    watched = Neighbours(lambda: iter([9999]), cpu_s=lambda pid: used(990.0, now_s), clock=lambda: now_s)
    monitor = GpuMonitor(
        FakeSampler(card),  # type: ignore[arg-type]
        card.facts(),
        share_resident=True,
        mps=lambda: False,
        neighbours=watched.busy if told_by == "cpu" else lambda least, elsewhere: "",
    )
    readings = []
    for tick in range(600):
        now_s = 1000 + tick * 0.5137
        last_second = [sample(back) for back in range(round(1 / sample_s))]
        card.more = {"util": sample(0), "peak": max(last_second) if told_by == "samples" else None}
        server.share = max(last_second) if told_by == "processes" else 0.0
        readings.append(monitor.read(now_s))
        verdict = idleness_of(readings[-30:], now_s=now_s, window_s=10.0, limits=monitor.limits)
        assert verdict.state != "idle", tick
    assert hertz > 0.2 or any(reading.others == 0 for reading in readings)


class AmdSmi:
    """Answers as AMD's documentation says that amdsmi does."""

    class AmdSmiException(Exception):
        pass

    def __init__(self, **changes: Any) -> None:
        self.facts: dict[str, Any] = {
            "asic_info": {
                "market_name": "AMD Instinct MI300X", "asic_serial": "0x2D1F6A3B9C", "num_compute_units": 304,
                "target_graphics_version": "gfx942",
            },
            "activity": {"gfx_activity": 0, "umc_activity": 0, "mm_activity": "N/A"},
            "vram_usage": {"vram_total": 196592, "vram_used": 283},
            "process_list": [],
            "compute_partition": "SPX",
            "driver_info": {"driver_name": "amdgpu", "driver_version": "6.12.12"},
            **changes,
        }  # fmt: skip

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["card"]

    def __getattr__(self, name: str) -> Any:
        def ask(handle: str) -> Any:
            found = self.facts[name.removeprefix("amdsmi_get_gpu_")]
            if found is None:
                raise self.AmdSmiException(name)
            return found

        return ask


class _Amd:
    def __init__(self, smi: AmdSmi) -> None:
        self.smi, self.error = smi, ""

    def facts(self) -> dict[str, Any]:
        from gemmtuned.daemon.device.amdsmi_child import answer

        return {gpu["uuid"]: gpu for gpu in answer(self.smi)["gpus"]}


def amd(**changes: Any) -> GpuMonitor:
    source = _Amd(AmdSmi(**changes))
    (facts,) = source.facts().values()
    return GpuMonitor(source, facts, mps=lambda: False)  # type: ignore[arg-type]


def test_an_idle_amd_gpu_is_a_device_like_any_other() -> None:
    monitor = amd()
    assert (monitor.name, monitor.id) == ("rocm:0", "rocm:GPU-0000002d1f6a3b9c")
    assert (monitor.device.kind, monitor.device.arch, monitor.device.units) == ("rocm", "gfx942", 304)
    assert monitor.conditions == "driver 6.12.12"
    assert monitor.read(1.0).others == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activity": {"gfx_activity": 37}}, "utilisation 37%"),
        ({"activity": {"gfx_activity": "N/A"}}, "does not say"),
        ({"activity": None}, "does not say"),
        ({"vram_usage": None}, "does not say"),
        ({"vram_usage": {"vram_total": 196592, "vram_used": 90000}}, "others hold 90000 MiB"),
        ({"process_list": [{"name": "N/A", "pid": 77, "mem": 1}]}, "others hold"),
        ({"compute_partition": "CPX"}, "slices"),
    ],
)
def test_an_amd_gpu_in_use_or_not_known_is_busy(changes: dict[str, Any], words: str) -> None:
    reading = amd(**changes).read(1.0)
    assert reading.others is None or reading.others > 0
    assert words in reading.note


def test_a_worker_is_shown_the_one_amd_gpu_it_was_told() -> None:
    from gemmtuned.daemon.seats.worker import _visible

    assert _visible("rocm:GPU-0000002d1f6a3b9c")["ROCR_VISIBLE_DEVICES"] == "GPU-0000002d1f6a3b9c"
    assert _visible("GPU-1")["CUDA_VISIBLE_DEVICES"] == "GPU-1" and _visible("cpu")["CUDA_VISIBLE_DEVICES"] == ""
