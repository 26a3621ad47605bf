"""Links on the way to the database: one that turns elsewhere is followed, and two ways to one file have one lock."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, Clock, FakeMonitor, Life, solution
from store_cases import NEW, open_store, problem, saw

from gemmtuned.configs.errors import StoreBusy, StoreError
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.reports import checks_host
from gemmtuned.reports.checks import Check


def turn(link: Path, to: Path) -> None:
    new = link.with_name("new")
    new.symlink_to(to)
    new.rename(link)


def calls(home: Path) -> int:
    return sum(row["calls"] for row in queries.coverage(home / "tune.db"))


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Callable[[str, range], Path]]:
    stores = []

    def make(name: str, sizes: range) -> Path:
        home = tmp_path / name
        stores.append(Store(home / "tune.db", locks=home / "locks"))
        found = [solution(Problem(m=8, n=64 * n, k=64)) for n in sizes]
        stores[-1].solutions.install(None, found, environment=ENVIRONMENT, now_s=1_800_000_000.0)
        publish(stores[-1], home / "configs", home / "locks", now_s=1_800_000_000.0)
        return home

    yield make
    for store in stores:
        store.close()


def published(home: Path) -> set[int]:
    manifest = read_manifest(home / "configs")
    assert manifest is not None
    return {s.problem.n // 64 for file in manifest.files for s in read_table(home / "configs", file)[0]}


def test_a_daemon_whose_home_is_a_link_that_turns_goes_on_in_the_other_home(
    tmp_path: Path, homes: Callable[[str, range], Path]
) -> None:
    one, two, link = homes("one", range(1, 6)), homes("two", range(10, 13)), tmp_path / "link"
    link.symlink_to(one)
    settings, clock = Settings.from_env({"GEMMTUNED_HOME": str(link)}), Clock()
    store = Store(settings.db, locks=settings.locks)
    daemon = Daemon(settings, store, [FakeMonitor()], Life(clock).make, now_s=clock.now_s)
    for _ in range(20):
        daemon.turn(clock.pass_s(1))
    turn(link, two)
    for _ in range(60):
        daemon.turn(clock.pass_s(1))
    store.close()

    assert (published(one), published(two)) == ({1, 2, 3, 4, 5}, {10, 11, 12})
    assert [len(queries.solutions(home / "tune.db")) for home in (one, two)] == [5, 3]


def test_counts_go_where_the_link_points_now(tmp_path: Path) -> None:
    link = tmp_path / "link"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link.symlink_to("one")
    store = open_store(link)
    now_s = os.stat(link).st_mtime
    store.sightings.add("serve", NEW, [saw(problem(), 7)], now_s=now_s)
    turn(link, Path("two"))
    store.sightings.add("serve", NEW, [saw(problem(), 5)], now_s=now_s)
    turn(link, Path("one"))
    store.sightings.add("serve", NEW, [saw(problem(), 1)], now_s=now_s)
    store.close()

    assert (calls(tmp_path / "one"), calls(tmp_path / "two")) == (8, 5)


@pytest.mark.parametrize("way", ["a link", "GEMMTUNED_DB", "GEMMTUNED_DB of no home"])
def test_two_homes_with_one_database_have_one_lock_for_it(tmp_path: Path, way: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    (tmp_path / "elsewhere").mkdir()
    first = one / "tune.db" if way != "GEMMTUNED_DB of no home" else tmp_path / "elsewhere" / "tune.db"
    ours = Store(first, locks=one / "locks")
    if way == "a link":
        (two / "tune.db").symlink_to(first)
    theirs = Store(two / "tune.db" if way == "a link" else first, locks=two / "locks", timeout_s=0.2)

    assert ours._db.lock.acquire(1)
    try:
        with pytest.raises(StoreBusy):
            theirs.sightings.add("serve", NEW, [saw(problem(), 7)], now_s=0)
    finally:
        ours._db.lock.release()
    theirs.sightings.add("serve", NEW, [saw(problem(), 7)], now_s=0)
    ours.close()
    theirs.close()


def test_doctor_tells_of_a_database_with_two_names_and_its_advice_ends_that(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    store = open_store(home)
    store.sightings.add("serve", NEW, [saw(problem(), 7)], now_s=time.time())
    store.close()
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home)})

    def told() -> list[Check]:
        return [check for check in checks_host.checks(settings) if check.name == "database file"]

    assert told() == []
    subprocess.run(["cp", "-al", str(home), str(copy)], check=True)
    (check,) = told()
    assert check.result == "WARN" and "has 2 names" in check.found

    subprocess.run(check.fix.partition(", then: ")[2], shell=True, check=True)
    assert told() == []
    assert calls(home) == 7


def test_locks_that_are_a_link_to_itself_are_an_error_of_ours(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    locks.symlink_to(locks)

    with pytest.raises(StoreError, match="locks"):
        Store(tmp_path / "tune.db", locks=locks)
