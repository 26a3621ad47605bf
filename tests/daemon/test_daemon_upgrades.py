"""A daemon under which torch, an engine or the home changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from daemon_world import World, problem
from fakes import ENVIRONMENT, NEWER

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.daemon.status_file import read_notice


def test_problems_of_another_environment_are_not_tuned_and_status_says_so(world: World) -> None:
    world.see(problem())
    world.see(problem(), problem(65), environment=NEWER)
    world.run(60)
    assert {s.stamp for s in world.store.solutions.published()[1]} == {"1"}
    assert [o.target for o in world.life.orders] == [problem()]
    notice = read_notice(world.settings.home)
    assert notice is not None
    assert [(e["environment"], e["problems"]) for e in notice["elsewhere"]] == [(NEWER.key, 2)]
    assert world.daemon.is_finished(world.clock.now_s)


def test_an_upgrade_under_a_running_daemon_gives_the_lease_back(world: World) -> None:
    world.see(problem())
    world.run(200)
    world.see(problem(65))
    world.see(problem(66), environment=NEWER)
    world.life.environment = NEWER
    world.run(30)
    solved = {(s.problem.n, s.stamp) for s in world.store.solutions.published()[1]}
    assert {n for n, _ in solved} == {64, 66}
    assert world.left() == (1, 0, 0, 0)


@pytest.mark.parametrize("place", [".", "configs"])
def test_a_home_that_cannot_be_looked_at_for_a_while_ends_no_daemon(world: World, place: str) -> None:
    """Closed to it, on a disk that does not answer: each call of stat fails, here by a link to a name too long."""
    world.see(problem())
    world.run(60)
    world.see(problem(65))
    folder = world.settings.home / place
    aside = world.settings.home.with_name("aside")
    folder.rename(aside)
    folder.symlink_to("x" * 300)
    try:
        world.run(60)
    finally:
        folder.unlink()
        aside.rename(folder)
    assert world.daemon.trouble

    world.run(120)
    assert world.daemon.trouble == "" and world.solved() == {problem(), problem(65)}
    manifest = read_manifest(world.settings.config_dir)
    assert manifest is not None and sum(file.rows for file in manifest.files) == 2


@pytest.mark.parametrize("jump_s", [8 * 3600.0, -86_400.0], ids=["the machine slept", "the clock was set back"])
def test_time_that_nobody_waited_is_no_time_without_an_idle_device(world: World, jump_s: float) -> None:
    """`daemon --wait-s 600` of a laptop that was shut for a night, or of one whose clock was wrong at first."""
    world.see(problem())
    world.busy_from(0.0)
    world.run(60)
    world.clock.pass_s(jump_s)
    world.run(60)
    assert world.clock.now_s - world.daemon.last_used_s == pytest.approx(120, abs=2)


def test_after_an_upgrade_of_torch_a_resting_daemon_tunes_what_programs_call_then(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last worker had the old torch, and nothing waits for that: only what waits for the new one starts another."""
    site = tmp_path / "site"
    (site / "torch-1.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))
    world.see(problem())
    world.run(200)
    world.see(problem(65), environment=NEWER)
    world.run(200)
    assert world.life.started == 1, "nothing has changed here: those are for a daemon elsewhere"

    (site / "torch-1.dist-info").rename(site / "torch-2.dist-info")
    world.life.environment = NEWER
    world.run(200)
    assert {(s.problem.n, s.stamp) for s in world.store.solutions.published()[1]} == {(64, "1"), (65, "2")}
    assert world.life.started == 2


def test_an_engine_that_is_installed_under_a_resting_daemon_has_what_waits_for_it_raced(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose package turns out to be broken is looked at once, and has no worker started again and again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    world.see(problem())
    world.run(200)
    world.store.sightings.add_wanted(ENVIRONMENT, [(problem(), "_C::cutlass_scaled_mm")], now_s=world.clock.now_s)
    world.run(200)
    assert world.life.started == 1

    metadata = tmp_path / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    world.run(400)
    assert world.life.started == 2 and len(world.life.orders) == 1

    metadata.parent.rename(tmp_path / "vllm-0.32.1.dist-info")
    world.life.environment = replace(ENVIRONMENT, stamps={**ENVIRONMENT.stamps, "vllm_cutlass": "0.32.1"})
    world.run(200)
    assert world.life.started == 3 and len(world.life.orders) == 2


def test_a_worker_of_before_an_upgrade_takes_no_further_problem(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has imported what is no longer there, and would import the rest from what is."""
    monkeypatch.syspath_prepend(str(tmp_path))
    world.see(problem(), problem(65), problem(66))
    world.run(60, until=lambda: len(world.solved()) == 1)  # and the second has begun
    (tmp_path / "engine-2.dist-info").mkdir()
    world.run(60, until=lambda: len(world.solved()) == 3)
    assert world.life.started == 2 and len(world.life.orders) == 3

    (tmp_path / "engine-2.dist-info").rmdir()  # as an upgrade begins: it lies there half, and no worker could start
    world.see(problem(67), problem(68))
    world.run(60, until=lambda: len(world.solved()) == 5)
    assert world.life.started == 2 and len(world.life.orders) == 5
