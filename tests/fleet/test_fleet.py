"""Hosts that share results: real daemons, stores and objects, a folder or an S3 server between; planted devices."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fleets import Host, problem, running, searches, until_covered

from gemmtuned.fleet.tables import MARK, files

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")


@pytest.mark.long
def test_a_second_host_takes_over_what_the_first_found_after_a_check_of_its_own(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    one, two = Host(tmp_path / "one", url), Host(tmp_path / "two", url)
    problems = [problem(i) for i in range(3)]
    with running([one, two]):
        one.see(*problems)
        one.start()
        until_covered([one], problems, 40)
        one.exchange().run(now_s=time.time())
        two.see(*problems)
        two.start()
        until_covered([two], problems, 40)

    assert set(searches([one, two]).values()) == {1}
    assert two.searched() == set()
    assert {s.backend for s in two.solved().values()} == {"fast"}
    assert "imported in the parent: []" in two.log.read_text()


@pytest.mark.long
def test_a_daemon_that_shares_with_a_repository_of_tables_tunes_what_it_likes(tmp_path: Path) -> None:
    """Nothing can be claimed there, so nothing is waited for."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / MARK).write_bytes(files("tables", "somebody", 2026)[MARK])
    host = Host(tmp_path / "one", shared.as_uri())
    with running([host]):
        host.see(problem(0), problem(1))
        host.start("--once")
        until_covered([host], [problem(0), problem(1)], 40)
        assert host.process is not None and host.process.wait(20) == 0
        assert "a repository of tables: every host tunes for itself" in host.log.read_text()
    assert sorted(path.name for path in shared.iterdir() if path.name != "results") == [MARK]
