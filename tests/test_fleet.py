"""Hosts that share results: real daemons, stores and objects, a folder or an S3 server between; planted devices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fleets import Host, problem, running, searches, until_covered

from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.fleet import record
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.opening import open_objects

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")


def test_a_second_host_takes_over_what_the_first_found_after_a_check_of_its_own(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    one, two = Host(tmp_path / "one", url), Host(tmp_path / "two", url)
    problems = [problem(i) for i in range(3)]
    with running([one, two]):
        one.see(*problems)
        one.start()
        until_covered([one], problems, 40)
        one.exchange().run(now_s=__import__("time").time())
        two.see(*problems)
        two.start()
        until_covered([two], problems, 40)

    assert set(searches([one, two]).values()) == {1}
    assert two.searched() == set()
    assert {s.backend for s in two.solved().values()} == {"fast"}
    assert "imported in the parent: []" in two.log.read_text()


class Failing:
    """Objects that can be written, and not be brought there in the end."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def flush(self) -> None:
        raise TryLater("the hub cannot be reached")


def test_a_result_is_sent_until_it_is_there_and_forged_ones_stop_nobody(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    one, two = Host(tmp_path / "one", shared.as_uri()), Host(tmp_path / "two", shared.as_uri())
    with running([one]):
        one.see(problem(0))
        one.start()
        until_covered([one], [problem(0)], 40)
    with pytest.raises(TryLater):
        one.exchange(Failing(open_objects(one.url))).run(now_s=time.time())
    one.exchange().run(now_s=time.time())
    (sent, *_) = sorted((shared / "results").rglob("*.json"))
    for number, (name, value) in enumerate({"us": 10**400, "stamp": "\ud800", "config": "\ud800"}.items()):
        whole = json.loads(sent.read_bytes())
        whole["record"]["solutions"][0][name] = value
        data = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
        unit = sent.name.partition("-")[0]
        (sent.parent / f"{unit}-{sha256(data).hexdigest()}.json").write_bytes(data)
        two.see(problem(0))
        done = two.exchange().run(now_s=time.time() + number)
        assert len(done.refused) == 1, (name, done)


def test_a_stranger_can_cost_time_and_a_kernel_and_nothing_else(tmp_path: Path) -> None:
    """Forged: a candidate that is slower here, figures that nobody measured, and that torch's own is best."""
    shared = tmp_path / "shared"
    one, two = Host(tmp_path / "one", shared.as_uri()), Host(tmp_path / "two", shared.as_uri())
    slower, boasted, denied = problems = [problem(i) for i in range(3)]
    forged = {
        slower.n: {"backend": "slow", "us": 1.0, "gain_low": 99.0},
        boasted.n: {"us": 0.001, "baseline_us": 1e9, "gain_low": 1e6},
        denied.n: {"backend": "torch", "us": 100.0, "gain_low": 1.0, "state": "default_best"},
    }
    with running([one, two]):
        one.see(*problems)
        one.start()
        until_covered([one], problems, 40)
        until(lambda: len(list((shared / "results").rglob("*.json"))) == 3 and not any_file(shared / "claims"))
        one.stop()
        for sent in list((shared / "results").rglob("*.json")):
            whole = json.loads(sent.read_bytes())
            row = whole["record"]["solutions"][0]
            row.update(forged[row["n"]])
            data = record.canonical(whole)
            sent.unlink()
            path = sent.parent / f"{sent.name.partition('-')[0]}-{sha256(data).hexdigest()}.json"
            path.write_bytes(data)
            with pytest.raises(TableError, match="signature"):
                record.read(str(path.relative_to(shared)), data, key=b"of the members only")
        two.see(*problems)
        two.start()
        until_covered([two], problems, 40)
        found = two.solved()
        assert (found[slower].backend, found[boasted].backend) == ("fast", "fast")
        assert (found[boasted].us, found[boasted].baseline_us) == (50.0, 100.0)
        assert two.searched() == {str(slower)}
        assert "slow does not win here" in two.log.read_text()

        assert found[denied].state == "default_best"  # nothing was named that could be raced
        two.store.ask_again([denied])
        until(lambda: two.solved()[denied].backend == "fast")


def any_file(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.1)
