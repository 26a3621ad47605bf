"""Who holds a GPU open where the driver names nobody: services, containers, quiet servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_gpu import MIB, Card, FakeSampler
from planted_card import VIEWS, WORKER, Scene

from gemmtuned.configs.settings import mps_pipe
from gemmtuned.daemon.device.attribution import LAUNCHING, TICKING, OwnUse
from gemmtuned.daemon.device.gpus import GpuMonitor
from gemmtuned.daemon.device.mps import Mps
from gemmtuned.daemon.device.neighbours import Neighbours


@pytest.fixture(params=[(view, by_pid) for view in VIEWS for by_pid in (True, False)], ids=str)
def card(request: pytest.FixtureRequest) -> Iterator[Card]:
    view, by_pid = request.param
    yield Card(view=view, by_pid=by_pid, counts=by_pid)


def busy(seen: list[tuple[float | None, str]]) -> bool:
    return any(others is None or others > 0 for others, _ in seen)


def test_a_multi_process_service_is_known_by_who_listens_on_its_pipe(tmp_path: Any) -> None:
    import os

    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_pipe(env)
    os.mkfifo(tmp_path / "control")
    assert not mps_pipe(env), "left over from one that has ended"
    listener = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert mps_pipe(env) == f"{tmp_path}/control of uid {os.geteuid()}", "any user may have put it there"
    finally:
        os.close(listener)
    (tmp_path / "control").unlink()
    (tmp_path / "control").write_text("no pipe")
    assert not mps_pipe(env)


def test_a_multi_process_service_elsewhere_is_known_by_its_process() -> None:
    now_s, names = [0.0], ["python", "bash"]
    mps = Mps(pipe=lambda: "", names=lambda: iter(names), clock=lambda: now_s[0])
    assert not mps.seen()
    names.append("nvidia-cuda-mps")  # as much of nvidia-cuda-mps-server as the kernel keeps
    now_s[0] += 11
    assert mps.seen() == "nvidia-cuda-mps"
    assert Mps(pipe=lambda: "a pipe", names=lambda: iter(())).seen() == "a pipe"
    assert not Mps(pipe=lambda: "").seen(), "here"


def test_a_machine_with_thousands_of_processes_is_gone_through_in_slices() -> None:
    now_s = [0.0]

    def many() -> Iterator[int | None]:
        for pid in range(5000):
            now_s[0] += 0.0001
            yield pid if pid == 4321 else None

    watch = Neighbours(many, cpu_s=lambda pid: 0.0, clock=lambda: now_s[0])
    longest_s, answers = 0.0, []
    for _ in range(200):
        now_s[0] += 0.1
        began_s = now_s[0]
        answers.append(watch.busy(TICKING))
        longest_s = max(longest_s, now_s[0] - began_s)
    assert longest_s < 0.006
    assert answers[0] is None and answers[-1] == "", "not known until all have been looked at"


def test_a_holder_of_the_gpu_that_uses_the_cpu_works_and_one_that_sleeps_does_not() -> None:
    now_s, used = [0.0], {7: 5.0, 8: 1.0}
    watch = Neighbours(lambda: iter(used), cpu_s=used.get, clock=lambda: now_s[0])
    for _ in range(30):
        now_s[0] += 0.1
        used[7] += 0.01 if round(now_s[0] * 10) % 10 == 0 else 0.0  # a timer's tick once a second
        assert watch.busy(TICKING) == ""
    seen = []
    for _ in range(3):
        now_s[0] += 0.1
        used[8] += 0.04
        seen.append((watch.busy(TICKING), watch.busy(LAUNCHING)))
    assert "8, which holds the GPU" in str(seen[-1][0]) and seen[-1][1] == ""
    for _ in range(3):
        now_s[0] += 0.1
        used[8] += 0.09
    assert "8, which" in str(watch.busy(LAUNCHING))
    used.clear()
    now_s[0] += 0.1
    assert watch.busy(TICKING) is None


def test_who_works_on_another_gpu_alone_does_not_count() -> None:
    """Seen on two H200: a busy program on one kept the daemon from the other, where a quiet one was loaded."""
    now_s, used = [0.0], {7: 5.0, 8: 1.0, 9: 1.0}
    watch = Neighbours(lambda: iter(used), cpu_s=used.get, clock=lambda: now_s[0])
    quiet, busy = Card(uuid="GPU-quiet"), Card(uuid="GPU-busy", index=1)
    quiet.start(7, held=20_000 * MIB)
    busy.start(8, held=20_000 * MIB)
    monitor = GpuMonitor(
        FakeSampler(quiet, busy),  # type: ignore[arg-type]
        quiet.facts(),
        share_resident=True,
        neighbours=watch.busy,
        mps=lambda: False,
    )

    def others(seconds: float) -> set[float | None]:
        seen = set()
        for _ in range(round(seconds * 10)):
            now_s[0] += 0.1
            used[8] += 0.1
            seen.add(monitor.read(now_s[0]).others)
        return seen

    others(0.5)
    assert others(2.0) == {0.0}
    used[9] += 0.1  # listed nowhere: it is about to start, or drives one that is listed
    assert 1.0 in others(0.2)
    both = quiet.start(8)
    assert others(0.3) == {1.0}, "on both"
    quiet.end(both)
    busy.view = "host"
    assert 1.0 in others(0.3), "another container's numbers say nothing"


def test_a_server_that_idles_along_does_not_work_however_seldom_it_is_looked_at() -> None:
    now_s, used = [0.0], {7: 5.0}
    watch = Neighbours(lambda: iter(used), cpu_s=used.get, clock=lambda: now_s[0])

    def look(after_s: float, share: float) -> str | None:
        now_s[0] += after_s
        used[7] += share * after_s
        return watch.busy(TICKING)

    for after_s in (0.1, 0.5, 0.1, 2.0, 6.0, 0.5):
        assert look(after_s, 0.02) == ""
    for after_s in (1.2, 3.0, 0.5):
        assert "7, which holds the GPU" in str(look(after_s, 1.0))


def test_beside_programs_of_other_gpus_alone_nobody_is_known_here() -> None:
    now_s, used = [0.0], {7: 5.0}
    watch = Neighbours(lambda: iter(used), cpu_s=used.get, clock=lambda: now_s[0])
    for _ in range(3):
        now_s[0] += 0.1
        watch.busy(TICKING)

    assert watch.busy(TICKING, {"7"}) is None, "who holds this one cannot be seen"


def test_a_worker_that_follows_one_that_died_is_not_charged_with_its_use() -> None:
    card = Card()
    scene = Scene(card)
    scene.watch(1.0)
    ours = scene.begin()
    scene.work(ours, 900 * MIB, 1.0)
    card.end(ours)
    card.more = {"by_pid": {str(WORKER): 99}, "peak": 0.99}  # the driver's samples of the last second
    scene.own = OwnUse(WORKER + 1)
    assert not busy(scene.watch(1.0))
