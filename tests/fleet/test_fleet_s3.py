"""Hosts over a real S3 server, moto's: claims, listings, clocks, a cut (test_fleet_processes.py has more)."""

from __future__ import annotations

import time
from pathlib import Path

import planted_search
import pytest
from fleet_s3 import Wire, s3_server
from fleets import Host, problem, rounds, running, searches

from gemmtuned.fleet import buckets
from gemmtuned.fleet.opening import open_objects

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
pytest.importorskip("moto", reason="the S3 server is moto's")
URL = "s3://fleet/tables"


def test_hosts_share_over_s3_and_one_that_is_cut_off_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted_search, "pause_s", 0.0)
    monkeypatch.setattr(buckets, "_CLIENT", {**buckets._CLIENT, "timeout": "1s"})
    monkeypatch.setattr(buckets, "_RETRY", {"max_retries": 0})
    problems = [problem(i) for i in range(8)]
    with s3_server(tmp_path / "s3") as variables:
        wire = Wire(int(variables["AWS_ENDPOINT"].rpartition(":")[2]))
        for name, value in {**variables, "AWS_ENDPOINT": f"http://127.0.0.1:{wire.port}"}.items():
            monkeypatch.setenv(name, value)
        hosts = [Host(tmp_path / f"h{i}", URL) for i in range(2)]
        with running(hosts):
            for host in hosts:
                host.see(*problems)
            rounds(hosts, step=3)
            assert {len(host.solved()) for host in hosts} == {8}
            assert searches(hosts) == {str(p): 1 for p in problems}

            objects = open_objects(URL)
            assert objects.create("claims/a/b.0", b"one") and not objects.create("claims/a/b.0", b"two")
            assert objects.get("claims/a/b.0", limit=9) == b"one" and objects.get("claims/a/c.0", limit=9) is None
            names = [entry.path for entry in objects.list("results")]
            assert [entry.path for entry in objects.list("results", after=names[3])] == names[4:]
            assert abs(objects.clock_s("claims/a/b.0") - time.time()) < 30

            wire.cut()
            began = time.monotonic()
            assert hosts[0].turn() is None, "nothing answers"
            assert time.monotonic() - began < 20
            wire.heal()
            hosts[0].see(problem(9))
            rounds(hosts[:1])
            assert problem(9) in hosts[0].solved()
