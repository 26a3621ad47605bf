"""What `gemmtuned sync --prune` removes from the store of a fleet, and what a home forgets with it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import planted_search
import pytest
from fleets import Host, problem, running

from gemmtuned.cli import build
from gemmtuned.configs.errors import SettingError
from gemmtuned.fleet import prune as pruning
from gemmtuned.fleet.beside_daemon import leave
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import claim_path
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.prune import prune
from gemmtuned.fleet.times import LEASE_S

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
DAY_S = 86_400.0


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Host]]:
    """A host that has sent four results and claimed what else it has seen."""
    monkeypatch.setattr(planted_search, "pause_s", 0.0)
    host = Host(tmp_path / "one", (tmp_path / "shared").as_uri())
    with running([host]):
        host.see(*map(problem, range(4)))
        host.work()
        host.exchange().run(now_s=time.time())
        host.see(problem(5))
        for _ in range(2):
            host.turn()
            host.work(0)
            host.queue.lease(planted_search.ENVIRONMENT, time.time())
        host.turn()
        yield tmp_path / "shared", host


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def run(url: str, **options: object) -> dict[str, list[str]]:
    found = prune(open_objects(url), **{"now_s": time.time(), "keep_s": 180 * DAY_S, "dry_run": False, **options})  # type: ignore[arg-type]
    return {kind: paths for kind, (_, paths) in found.items() if paths}


def test_nothing_goes_that_is_young_and_needed(shared: tuple[Path, Host]) -> None:
    assert run(shared[1].url) == {}
    assert run(shared[1].url, verify=Trust()) == {}


def test_old_results_lapsed_claims_and_silent_hosts_go(shared: tuple[Path, Host]) -> None:
    folder, host = shared
    old, *others = sorted((folder / "results").rglob("*.json"))
    age(old, 181 * DAY_S)
    (claim,) = (path for path in (folder / "claims").rglob("*") if path.is_file())
    age(claim, 2 * LEASE_S + 60)
    (seen,) = (folder / "hosts").rglob("seen.json")
    age(seen, 31 * DAY_S)
    found = run(host.url, dry_run=True)
    assert {kind: len(paths) for kind, paths in found.items()} == {"result": 1, "claim": 1, "host": 1}
    assert old.exists() and claim.exists() and seen.exists(), "a dry run"
    assert run(host.url) == found
    assert not old.exists() and not claim.exists() and not seen.exists() and all(path.exists() for path in others)
    done = host.turn()
    assert done is not None and seen.exists() is False
    host.exchange().run(now_s=time.time())
    assert seen.exists(), "who is there still says so again"


def test_more_of_a_unit_than_three_go_oldest_first(shared: tuple[Path, Host]) -> None:
    folder, host = shared
    one = sorted((folder / "results").rglob("*.json"))[0]
    more = [one.with_name(f"{one.name[:33]}{number:064x}.json") for number in range(4)]
    for number, path in enumerate(more):
        path.write_bytes(b"{}")
        age(path, 100 - number)
    age(one, 200)
    assert {Path(path).name for path in run(host.url)["result"]} == {one.name, more[0].name}


def test_forged_results_push_no_good_one_out_when_they_are_verified(shared: tuple[Path, Host]) -> None:
    folder, host = shared
    one = sorted((folder / "results").rglob("*.json"))[0]
    forged = [one.with_name(f"{one.name[:33]}{number:064x}.json") for number in range(5)]
    for path in forged:
        path.write_bytes(one.read_bytes())
    age(one, 200)
    found = run(host.url, verify=Trust())
    assert set(found) == {"refused result"} and {Path(path).name for path in found["refused result"]} == {
        path.name for path in forged
    }
    assert one.exists()
    assert len(run(host.url, verify=Trust(hosts=("rack7-*",)), dry_run=True)["refused result"]) == 4
    assert len(run(host.url, verify=Trust(b"a key of sixteen"), dry_run=True)["refused result"]) == 4
    with pytest.raises(SettingError, match="all 4 results there would be refused, so none is removed"):
        run(host.url, verify=Trust(b"a key of sixteen"))


def test_claims_that_a_stranger_made_up_push_no_members_out(shared: tuple[Path, Host]) -> None:
    folder, host = shared
    (claim,) = (path for path in (folder / "claims").rglob("*") if path.is_file())
    environment, unit = claim.parent.name, claim.name.partition(".")[0]
    key = b"a key of sixteen"
    names = [claim_path(environment, unit, number, by) for number, by in ((0, key), (5, None), (6, b"of strangers"))]
    ours, *others = [folder / name for name in names]
    ours.write_bytes(b"")
    for path in others:
        path.write_bytes(b"")
    assert run(host.url, key=key) == {}, "what nobody signed counts for nothing, and is young"
    for path in (claim, *others):
        age(path, 2 * LEASE_S + 60)
    assert {folder / name for name in run(host.url, key=key)["claim"]} == {claim, *others}
    age(ours, -DAY_S)
    assert run(host.url, key=key)["claim"] == [names[0]], "it is from a day to come"


def test_who_has_no_key_removes_no_claim_of_those_who_have(shared: tuple[Path, Host]) -> None:
    folder, host = shared
    (claim,) = (path for path in (folder / "claims").rglob("*") if path.is_file())
    environment, unit = claim.parent.name, claim.name.partition(".")[0]
    members, stranger = (
        folder / claim_path(environment, unit, number, by) for number, by in ((0, b"k" * 16), (9, None))
    )
    members.write_bytes(b"")
    stranger.write_bytes(b"")
    assert run(host.url)["claim"] == [str(claim.relative_to(folder))], "the older one of those without a key"
    age(members, 2 * LEASE_S + 60)
    assert str(members.relative_to(folder)) in run(host.url)["claim"]


def test_one_host_has_a_quota(shared: tuple[Path, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, host = shared
    monkeypatch.setattr(pruning, "OF_A_HOST", 3)
    for number, path in enumerate(sorted((folder / "results").rglob("*.json"))):
        age(path, 100 - number)
    oldest = sorted((folder / "results").rglob("*.json"))[0]
    assert [Path(path).name for path in run(host.url, verify=Trust())["refused result"]] == [oldest.name]


def test_the_command_says_what_it_removes(shared: tuple[Path, Host], capsys: pytest.CaptureFixture[str]) -> None:
    folder, host = shared
    (folder / "results" / "x").mkdir()
    old = sorted((folder / "results").rglob("*.json"))[0]
    old.write_bytes(b"{}")

    def ask(*options: str, code: int = 0) -> dict[str, object]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            build()(["sync", host.url, *options, "--json"], prog_name="gemmtuned")
        assert end.value.code == code
        found: dict[str, object] = json.loads(capsys.readouterr().out or "{}")
        return found

    assert ask("--prune", "--dry-run")["removed"] == {"refused result": [], "result": [], "claim": [], "host": []}
    removed = ask("--prune", "--verify")["removed"]
    assert isinstance(removed, dict) and len(removed["refused result"]) == 1 and not old.exists()
    ask("--verify", code=2)


def test_a_home_forgets_names_that_are_gone_when_it_lists_all(shared: tuple[Path, Host], tmp_path: Path) -> None:
    folder, _ = shared
    two = Host(tmp_path / "two", folder.as_uri())
    with running([two]):
        two.see(problem(0))
        two.turn()
        assert two.rows("SELECT count(*) FROM fleet_listed") == [(4,)]
        for path in sorted((folder / "results").rglob("*.json"))[1:]:
            path.unlink()
        two.skew_s = DAY_S + 1
        two.turn()
        assert two.rows("SELECT count(*) FROM fleet_listed") == [(1,)]


def test_a_daemon_without_a_url_is_held_back_by_nothing_that_a_killed_one_left(shared: tuple[Path, Host]) -> None:
    _, host = shared
    assert host.store.fleet.gate(planted_search.ENVIRONMENT, now_s=time.time()) is not None
    leave(host.settings)
    assert host.store.fleet.gate(planted_search.ENVIRONMENT, now_s=time.time()) is None
