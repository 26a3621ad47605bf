"""Tables that come with gemmtuned: every row could be tried here, and a daemon on such a GPU tries them first."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from fake_gpu import Card
from fakes import Clock
from gpu_machine import Machine

from gemmtuned.configs.hint import Hint
from gemmtuned.configs.shipped import FOLDER, shipped
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device

ARCHES = sorted(path.name for path in FOLDER.iterdir() if (path / "manifest.json").exists())


def rows(arch: str) -> list[Hint]:
    found = shipped(arch)
    assert found
    return found


def test_something_is_shipped() -> None:
    assert "sm_90" in ARCHES


@pytest.mark.parametrize("arch", ARCHES)
def test_every_row_was_worth_publishing_and_has_a_launch_here(arch: str) -> None:
    pytest.importorskip("triton")
    from gemmtuned.kernels.catalog import FOLDERS, record_of
    from gemmtuned.kernels.families.error import R_FACTOR, quantised

    seen = set()
    for hint in rows(arch):
        solution = hint.solution
        assert solution is not None and solution.state == "published" and solution.gain_low > 1.02
        allowed = R_FACTOR * math.hypot(solution.baseline_err, quantised(solution.problem)) + 1e-4
        assert not solution.launch and solution.err <= allowed
        assert (solution.problem, solution.device) not in seen, "one row a problem and device"
        seen.add((solution.problem, solution.device))
        if solution.backend in FOLDERS:
            record_of(solution.candidate, solution.problem)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_shipped_compiles_here_without_spills(arch: str) -> None:
    pytest.importorskip("triton")
    from gemmtuned.kernels.compile_candidate import compile_candidate
    from gemmtuned.kernels.cuda import nvrtc

    if nvrtc.version() is None:
        pytest.skip("needs NVRTC")

    for hint in rows(arch):
        solution = hint.solution
        assert solution is not None
        compile_candidate(
            solution.candidate, solution.problem, Device("", "cuda", "", arch, 0)
        )  # it refuses what spills


def test_nothing_is_shipped_for_other_machines() -> None:
    assert not shipped("sm_61") and not shipped("") and not shipped("x86_64")


def test_a_folder_that_others_may_write_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "tables"
    shutil.copytree(FOLDER / "sm_90", folder / "sm_90")
    assert shipped("sm_90", folder)
    (folder / "sm_90" / "manifest.json").chmod(0o666)
    assert not shipped("sm_90", folder)
    assert "shipped table left out" in caplog.text and "manifest.json" in caplog.text


def test_every_family_has_rows_for_the_device_that_was_at_hand() -> None:
    problems = [hint.problem for hint in rows("sm_90") if json.loads(hint.row)["device"] == "cuda-nvidia-h200-132"]
    assert {p.family for p in problems if p} == {"batched", "dense", "scaled", "grouped", "moe", "weight_only"}


@pytest.mark.parametrize("backend", ["triton", "cuda", "moe_decode"])
def test_a_daemon_tries_them_first(tmp_path: Path, backend: str) -> None:
    clock = Clock()
    ours = [hint for hint in rows("sm_90") if json.loads(hint.row)["device"] == "cuda-nvidia-h200-132"]
    best = next(hint for hint in ours if hint.candidate and hint.candidate.backend == backend)
    assert best.problem is not None
    machine = Machine(tmp_path / "home", clock, [Card()], locks=tmp_path / "locks")
    stamps = {**machine.environment.stamps, backend: "1"}
    machine.life.environment = machine.environment = type(machine.environment)(machine.environment.device, stamps)
    for _ in range(2):  # a second start does not keep them twice
        machine.start()
    sightings = [Sighting(best.problem, "miss", 10)]
    machine.store.sightings.add("serve", machine.environment, sightings, now_s=clock.now_s)
    for _ in range(600):
        machine.daemon.turn(clock.now_s)
        clock.pass_s(machine.daemon.pause_s)
        if machine.life.orders:
            break
    order = machine.life.orders[0]
    assert order.target == best.problem and order.options.seeds[0] == best.candidate
    kept = machine.store._db.read(lambda conn: conn.execute("SELECT count(*) FROM hint").fetchone()[0])
    assert kept == len(rows("sm_90"))
    assert len(ours) < kept, "those of another device with such an architecture come after"
