"""Leases of daemons that died, or may have: on this machine, in containers, on other hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon_world import World, problem
from fakes import ENVIRONMENT

from gemmtuned.daemon.seats.work_queue import is_dead, outlived_boot, owner_name
from gemmtuned.daemon.status_file import Notice, read_notice, write_notice


def test_leases_of_dead_daemons_are_free_at_once_and_uncounted(world: World) -> None:
    world.see(problem())
    host, _, started = owner_name().split(":")
    dead = f"{host}:4194303:{started}"  # the largest number a process can have
    for _ in range(10):
        assert world.store.leases.lease_next(dead, ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6) is not None
        assert world.left() == (0, 1, 0, 0)
        world.daemon.resume(world.clock.now_s)
        assert world.left() == (1, 0, 0, 0)


def test_an_owner_that_was_killed_is_dead_before_anybody_waited_for_it() -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host, _, started = owner_name().split(":")
    start = Path(f"/proc/{killed.pid}/stat").read_text().rpartition(")")[2].split()[19]
    boot, _, namespace = started.split(".")
    owner = f"{host}:{killed.pid}:{boot}.{start}.{namespace}"
    try:
        assert not is_dead(owner)
    finally:
        killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(owner)
    killed.communicate()


def test_a_daemon_whose_process_cannot_be_looked_at_runs_for_as_long_as_it_speaks(tmp_path: Path) -> None:
    host, pid, rest = owner_name().split(":")
    boot, start, namespace = rest.split(".")
    elsewhere = f"{host}:4194303:{boot}.{start}.{int(namespace) + 1}"
    older = f"{host}:4194303:{boot}.{start}"  # of a version that named no namespace
    for owner, silent_s, runs in (
        (owner_name(), 3600.0, True), (f"{host}:4194303:{boot}.{start}.{namespace}", 0.0, False),
        (elsewhere, 0.0, True), (elsewhere, 60.0, False), (older, 0.0, True), (older, 60.0, False),
        (f"another-host:{pid}:{boot}.{start}.{namespace}", 60.0, False),
    ):  # fmt: skip
        said = Notice(
            owner=owner, pid=1, started_s=0.0, updated_s=time.time() - silent_s, state="tuning", reason="",
            generation=0, solved=0,
        )  # fmt: skip
        write_notice(tmp_path, said)
        told = read_notice(tmp_path)
        assert told is not None and told["running"] is runs, (owner, silent_s)


def test_the_daemon_of_a_home_runs_for_no_copy_of_it(tmp_path: Path) -> None:
    home, moved, copied = (tmp_path / name for name in ("home", "moved", "copied"))
    home.mkdir()
    said = Notice(
        owner=owner_name(), pid=os.getpid(), started_s=0.0, updated_s=time.time(), state="tuning", reason="",
        generation=0, solved=0,
    )  # fmt: skip
    write_notice(home, said)
    shutil.copytree(home, copied)
    home.rename(moved)
    runs = [told["running"] for told in map(read_notice, (moved, copied)) if told is not None]
    assert runs == [True, False]


def test_an_owner_is_dead_only_when_its_process_is_gone_or_the_machine_started_anew() -> None:
    host, pid, started = owner_name().split(":")
    boot, start, namespace = started.split(".")
    assert namespace.isdigit()
    assert not is_dead(f"{host}:{pid}:{boot}.{start}.{namespace}")
    assert is_dead(f"{host}:{pid}:{boot}.{int(start) - 1}.{namespace}"), "the number was given to another process"
    assert is_dead(f"{host}:{pid}:00000000.{start}.{namespace}")
    assert is_dead(f"{host}:4194303:{boot}.{start}.{namespace}")
    for elsewhere in (f"{namespace}1", "", "0"):
        assert not is_dead(f"{host}:4194303:{boot}.{start}.{elsewhere}"), "a number of another container"
    assert not is_dead(f"{host}:4194303:{boot}.{start}"), "written by a version before namespaces"
    for unknown in (f"elsewhere:{pid}:{boot}.1", "", "x", "a:b:c", f"{host}:{pid}:"):
        assert not is_dead(unknown)
    assert outlived_boot(f"{host}:1:{boot}.1")
    assert not outlived_boot(f"{host}:1:00000000.1")


def test_where_the_own_namespace_is_not_known_nobody_is_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtuned.daemon.seats.work_queue.pid_namespace", lambda: None)
    mine = owner_name()

    assert mine.endswith(".") and not is_dead(mine.replace(f":{os.getpid()}:", ":4194303:"))


def test_a_live_daemon_of_another_container_keeps_its_lease_until_it_lapses(world: World) -> None:
    world.see(problem())
    neighbour = owner_name().replace(f":{os.getpid()}:", ":4194303:") + "1"
    world.store.leases.lease_next(neighbour, ENVIRONMENT, now_s=world.clock.now_s, hold_s=60)

    world.daemon.resume(world.clock.now_s)
    assert world.left() == (0, 1, 0, 0)
    world.clock.now_s += 61
    assert world.left() == (1, 0, 0, 0)


def test_an_attempt_counts_when_the_machine_went_down_with_it(world: World) -> None:
    world.see(problem())
    host, pid, started = owner_name().split(":")
    before_boot = f"{host}:{pid}:00000000.{started.partition('.')[2]}"
    for _ in range(3):
        assert world.store.leases.lease_next(before_boot, ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6) is not None
        world.daemon.resume(world.clock.now_s)
    assert world.store.leases.lease_next(before_boot, ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6) is None
    assert world.left() == (0, 0, 0, 1)


def test_leases_of_the_living_and_of_other_hosts_stay(world: World) -> None:
    world.see(problem(64), problem(65))
    world.store.leases.lease_next(world.daemon.owner, ENVIRONMENT, now_s=world.clock.now_s, hold_s=60)
    world.store.leases.lease_next("elsewhere:1:1", ENVIRONMENT, now_s=world.clock.now_s, hold_s=60)
    world.daemon.resume(world.clock.now_s)
    assert world.left() == (0, 2, 0, 0)
