"""Hosts that share results: real daemons, stores and objects, a folder or an S3 server between; planted devices."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fleets import Host, problem, running, searches, until_covered

from gemmtuned.configs.errors import TryLater
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
