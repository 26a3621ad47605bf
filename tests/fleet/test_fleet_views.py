"""What people are shown of a fleet: coverage, what waits, who found what, whose card is slow; snapshots."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import planted_search
import pytest
from fakes import ENVIRONMENT, NEWER, solution
from fleets import Host, problem, running

from gemmtuned.cli import build
from gemmtuned.configs.settings import Settings
from gemmtuned.fleet import seen, views
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.seen import Seen
from gemmtuned.fleet.sync import Exchange

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
Ask = Callable[..., dict[str, Any]]
SLOW = 1.3  # of the third host's card


def slower(*args: Any, **named: Any) -> Any:
    found = planted_search.tune(*args, **named)
    return replace(found, us=found.us * SLOW, baseline_us=found.baseline_us * SLOW)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Three hosts, the last on a slow card; the first searched problems 0 to 5, the others took them over; 6 waits."""
    monkeypatch.setattr(planted_search, "pause_s", 0.0)
    url = (tmp_path / "shared").as_uri()
    hosts = [Host(tmp_path / name, url, GEMMTUNED_SYNC_NAME=name) for name in ("one", "two", "three")]
    with running(hosts):
        for host in hosts:
            host.see(*map(problem, range(6)))
            for _ in range(4):
                host.turn()
                host.work(search=slower if host is hosts[2] else planted_search.tune)
            host.see(problem(6), calls=30)
            host.exchange().run(now_s=time.time())
        yield hosts


@pytest.fixture
def ask(hosts: list[Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Ask a command for JSON, as of a home that has seen nothing itself."""
    monkeypatch.setenv("GEMMTUNED_HOME", str(hosts[0].folder.parent / "elsewhere"))
    monkeypatch.setenv("GEMMTUNED_SYNC", hosts[0].url)

    def ask(*arguments: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            build()([*arguments, "--json"], prog_name="gemmtuned")
        assert end.value.code == code, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out or "{}")
        return found

    return ask


def test_coverage_by_host_device_family_and_problem(ask: Ask) -> None:
    whole = ask("coverage", "--fleet", "--by", "host")
    assert {row["host"].rpartition("-")[0] for row in whole["rows"]} == {"one", "two", "three"}
    assert {(row["problems"], row["tuned_problems"], row["calls"]) for row in whole["rows"]} == {(7, 6, 90)}
    assert whole["hosts"] == 3 and 0.5 < whole["total"]["covered_share"] < 1.0
    by_calls = ask("coverage", "--fleet", "--by", "device", "--weight", "calls")
    assert by_calls["total"]["covered_share"] == pytest.approx(60 / 90)
    (row,) = ask("coverage", "--fleet")["rows"]
    assert (row["family"], row["hosts"], row["problems"], row["tuned_problems"]) == ("dense", 3, 7, 6)
    assert len(ask("coverage", "--fleet", "--by", "problem")["rows"]) == 7
    ask("coverage", "--fleet", "--weight", "calls", "--fail-under", "90", code=1)
    ask("coverage", "--fleet", "--by", "run", code=2)
    ask("coverage", "--by", "host", code=2)


def test_calls_that_wait_for_a_race_beside_an_engines_kernel_are_not_covered(hosts: list[Host]) -> None:
    """Nor are they told to be searched on another host: there is a verdict."""
    counts = [
        {"problem": str(problem(at)), "calls": 100, "us": 1.0, "hits": 30, "covered": covered, "worth": 30.0,
         "last_seen_us": 1}
        for at, covered in enumerate((True, 0.3, 1e-9, 0))
    ]  # fmt: skip
    [environment] = hosts[0].store.hints.known_environments()
    told = [Seen("one", 1, environment, counts, [])]
    [row] = views.coverage(told, "family")
    assert (row["tuned_problems"], row["problems"]) == (1, 4)
    assert row["covered_calls"] == pytest.approx(130) and row["covered_time_us"] == pytest.approx(130)
    assert [one["problem"] for one in views.untuned(told, ())] == [str(problem(3))]


def test_what_waits_for_all_hosts_and_whether_somebody_tunes_it(ask: Ask, hosts: list[Host]) -> None:
    (row,) = ask("untuned", "--fleet")["rows"]
    assert (row["problem"], row["hosts"], row["calls"], row["state"]) == (str(problem(6)), 3, 90, "queued")
    hosts[0].work(0)
    hosts[0].queue.lease(planted_search.ENVIRONMENT, time.time())
    hosts[0].turn()
    (row,) = ask("untuned", "--fleet")["rows"]
    assert row["state"] == "claimed"
    ask("untuned", "--fleet", "--by", "layer", code=2)


def test_who_found_it_how_hosts_differ_and_whose_card_is_slow(ask: Ask) -> None:
    whole = ask("gains", "--fleet")
    assert len(whole["rows"]) == 6
    for row in whole["rows"]:
        assert (row["hosts"], row["backend"], row["us"], row["spread"]) == (3, "fast", 50.0, pytest.approx(SLOW))
        assert row["found_by"].startswith("one-") and row["slowest"].startswith("three-")
    slow, *others = whole["hosts"]
    assert slow["host"].startswith("three-") and slow["slower"] == pytest.approx(SLOW) and slow["compared"] == 6
    assert {row["slower"] for row in others} == {1.0}
    assert {(row["host"].rpartition("-")[0], row["found"], row["taken"]) for row in whole["hosts"]} == {
        ("one", 6, 0), ("two", 0, 6), ("three", 0, 6),
    }  # fmt: skip
    (note,) = [note for note in whole["notes"] if "look at its clocks" in note]
    assert note.startswith("three-") and "1.30x" in note


def test_a_snapshot_for_other_tools(ask: Ask, hosts: list[Host], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [row["rows"] for row in ask("fleet", "export", "--out", str(out))["files"]] == [21, 18, 3]
    with (out / "figures.csv").open(newline="") as file:
        figures = list(csv.DictReader(file))
    assert {row["backend"] for row in figures} == {"fast"} and {row["n"] for row in figures} >= {"1000", "1005"}
    with (out / "counts.csv").open(newline="") as file:
        assert sum(int(row["calls"]) for row in csv.DictReader(file)) == 270
    ask("fleet", "export", "--out", str(out))  # again, over what it wrote itself
    (out / "counts.csv").write_text("mine")
    ask("fleet", "export", "--out", str(out), code=1)
    assert (out / "counts.csv").read_text() == "mine"
    ask("fleet", "export", "--out", str(out), "--force")
    can = find_spec("pyarrow") is not None
    ask("fleet", "export", "--out", str(out), "--format", "parquet", code=0 if can else 2)
    assert (out / "counts.parquet").exists() == can


def test_a_host_whose_file_is_none_or_that_is_not_listened_to_is_left_out_and_named(
    ask: Ask, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(hosts[0].url.removeprefix("file://")) / "hosts"
    (spoilt,) = folder.glob("two-*/seen.json")
    spoilt.write_bytes(spoilt.read_bytes()[:-5])
    whole = ask("coverage", "--fleet", "--by", "host")
    assert whole["hosts"] == 2 and len(whole["refused"]) == 1 and "two-" in whole["refused"][0]
    assert any("left out" in note for note in whole["notes"])
    monkeypatch.setenv("GEMMTUNED_SYNC_HOSTS", "three-*")
    assert ask("coverage", "--fleet")["hosts"] == 1
    key = folder.parent / "key"
    key.write_bytes(b"a secret of members")
    key.chmod(0o600)
    monkeypatch.setenv("GEMMTUNED_SYNC_KEY", str(key))
    assert ask("coverage", "--fleet")["hosts"] == 0, "they report without a signature"


def test_nothing_to_show_and_no_url(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = (tmp_path / "empty").as_uri()
    for command in ("coverage", "untuned", "gains"):
        assert ask(command, "--fleet", "--url", empty)["rows"] == []
        ask(command, "--url", empty, code=2)
    monkeypatch.delenv("GEMMTUNED_SYNC")
    ask("coverage", "--fleet", code=2)
    assert not Settings.from_env().db.exists(), "a look at a fleet makes no database"


def test_status_says_how_a_host_stands_with_its_fleet(
    ask: Ask, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("status")["fleet"] is None
    monkeypatch.setenv("GEMMTUNED_HOME", str(hosts[1].folder))
    state = ask("status")["fleet"]
    assert (state["url"], state["reached"], state["used"], state["refused"]) == (hosts[1].url, True, 6, 0)
    hosts[1].store.fleet_sync.begin(hosts[1].url, live_until_s=time.time() - 1)
    state = ask("status")["fleet"]
    assert not state["reached"]


def test_a_host_of_very_many_problems_tells_of_as_many_as_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would hear of it at all, from the upgrade on that brings one environment more."""
    host = Host(tmp_path / "one", (tmp_path / "shared").as_uri())
    with running([host]):
        for environment in (ENVIRONMENT, NEWER):
            for number in range(24):
                host.see(problem(number), environment=environment, calls=1 + number)
            solutions = [solution(problem(number), environment) for number in range(24)]
            host.store.solutions.install(None, solutions, environment=environment, now_s=time.time())
        whole = Exchange(
            store=host.store, objects=open_objects(host.url), url=host.url, host="a-00000000", trust=Trust()
        )
        whole.run(now_s=time.time())
        (file,) = (tmp_path / "shared/hosts").glob("*/seen.json")
        monkeypatch.setattr(seen, "MAX_BYTES", file.stat().st_size // 3)
        whole.run(now_s=time.time())

        told, refused = seen.read_all(whole.objects, Trust())
        assert refused == [] and {one.environment.key for one in told} == {ENVIRONMENT.key, NEWER.key}
        for one in told:
            counted = [row["problem"] for row in one.counts]
            assert 3 <= len(counted) < 24 and str(problem(23)) in counted and str(problem(0)) not in counted
            assert {row["problem"] for row in one.figures} <= set(counted)
