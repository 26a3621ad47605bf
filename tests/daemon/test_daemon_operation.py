"""The daemon as a service: systemd's protocol, units, structured logs, metrics on the loopback interface."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmtuned.commands.options import start_logging
from gemmtuned.configs.settings import Settings, watchdog_s
from gemmtuned.daemon.service.only_one import only_daemon
from gemmtuned.daemon.service.sd_notify import ServiceManager

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "docs/systemd").glob("*.service"))


@pytest.fixture
def manager_socket(tmp_path: Path):  # type: ignore[no-untyped-def]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(30)
        yield sock


def test_a_real_daemon_says_when_it_is_ready_alive_and_stopping(tmp_path: Path, manager_socket: socket.socket) -> None:
    env = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000", "GEMMTUNED_IDLE_S": "5"}
    env |= {"GEMMTUNED_HOME": str(tmp_path / "home")}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "gemmtuned", "daemon", "--devices", "cpu", "--log-format", "json"],
        env=env, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert manager_socket.recv(4096).startswith(b"READY=1\nSTATUS=")
        assert [manager_socket.recv(4096).split(b"\n")[0] for _ in range(3)] == [b"WATCHDOG=1"] * 3
        daemon.terminate()
        end = time.monotonic() + 5
        while manager_socket.recv(4096) != b"STOPPING=1":
            assert time.monotonic() < end
        _, said = daemon.communicate(timeout=10)
    finally:
        daemon.kill()
    assert daemon.returncode == 143
    events = [json.loads(line) for line in said.splitlines()]
    assert [e["event"] for e in events] == ["started", "stopped"]
    assert events[0]["home"] == str(tmp_path / "home") and events[1]["exit_code"] == 143


def test_a_unit_whose_daemon_finds_another_is_told_so_and_never_that_it_is_ready(
    tmp_path: Path, manager_socket: socket.socket
) -> None:
    """systemd takes the end of a unit that was not ready for a failure, shows this, and tries again later."""
    env = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "GEMMTUNED_HOME": str(tmp_path)}
    with only_daemon(Settings.from_env(env)):
        command = [sys.executable, "-m", "gemmtuned", "daemon", "--devices", "cpu"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "another daemon runs" in done.stderr
    said = manager_socket.recv(4096).decode()
    assert said.startswith(f"STATUS=another daemon runs for {tmp_path}: pid {os.getpid()},") and "READY" not in said
    manager_socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager_socket.recv(4096)
    for unit in UNITS:
        assert "\nType=notify\n" in unit.read_text() and "\nRestart=on-failure\n" in unit.read_text()


def test_signs_of_life_come_thrice_as_often_as_asked_for(tmp_path: Path, manager_socket: socket.socket) -> None:
    manager = ServiceManager(str(tmp_path / "notify"), 60.0)
    manager_socket.settimeout(0.01)
    heard = 0
    for second in range(180):
        manager.alive(float(second), "tuning")
        try:
            manager_socket.recv(4096)
            heard += 1
        except TimeoutError:
            pass
    assert heard == 9


def test_outside_of_systemd_nothing_is_sent_and_nothing_fails(tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "nobody"), "@gemmtuned-nobody-listens"):
        manager = ServiceManager(address, 1.0)
        manager.ready("x")
        manager.alive(0.0, "x")
        manager.stopping()
    assert watchdog_s({}) is None
    assert watchdog_s({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}) == 60.0
    assert watchdog_s({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}) is None, "meant for another process"


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_units_are_valid_and_start_the_daemon_with_options_it_has(unit: Path, tmp_path: Path) -> None:
    command = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    options = [word for word in command.split() if word.startswith("--")]
    known = subprocess.run(
        [sys.executable, "-m", "gemmtuned", "daemon", "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout  # fmt: skip
    assert [option for option in options if option not in known] == []
    assert "\nOOMPolicy=continue\n" in unit.read_text(), "else one that takes all memory ends the daemon"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    copy = tmp_path / unit.name
    text = (
        unit.read_text()
        .replace("%h/.venv/bin/gemmtuned", "/bin/true")
        .replace("/opt/gemmtuned/bin/gemmtuned", "/bin/true")
    )
    copy.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if unit.name in line and "Failed to" not in line]
    assert complaints == []


def test_the_system_unit_is_hardened() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = ROOT / "docs/systemd/gemmtuned.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("an older systemd-analyze")
    assert done.returncode == 0, done.stdout[-2000:]


def test_log_lines_as_json_have_the_pairs_of_the_event_as_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("gemmtuned")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        start_logging("info", "json")
        logging.getLogger("gemmtuned.daemon").info(
            "solved generation=%d problem=%s backend=%s was_us=%.2f reason=%r",
            4, "bf16:1x8x8,math=reduced", 'triton {"rows":2}', 5.07, "it's \"fast\" x=1",
        )  # fmt: skip
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("gemmtuned.daemon").exception("failed")
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["event"], first["level"], first["generation"], first["was_us"]) == ("solved", "INFO", 4, 5.07)
    assert (first["problem"], first["backend"]) == ("bf16:1x8x8,math=reduced", 'triton {"rows":2}')
    assert first["reason"] == 'it\'s "fast" x=1'
    assert first["time"].endswith("+00:00")
    assert second["event"] == "failed" and "ValueError: no" in second["traceback"]


@pytest.mark.timeout(20)
def test_who_does_not_read_the_log_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S in a terminal, a pager, a collector that is stuck: a daemon waited for it for ever, at SIGTERM too."""
    logger = logging.getLogger("gemmtuned")
    before = logger.handlers[:], logger.level, logger.propagate
    reads, writes = os.pipe()
    with os.fdopen(reads) as reader, os.fdopen(writes, "w", buffering=1) as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        try:
            start_logging("info")
            for number in range(2000):
                logger.info("solved generation=%d problem=%s", number, "x" * 100)
            os.set_blocking(reads, False)
            first = reader.read().splitlines()
            logger.info("goes on")
            last = reader.read().splitlines()
        finally:
            logger.handlers[:], logger.propagate = before[0], before[2]
            logger.setLevel(before[1])
    assert 100 < len(first) < 2000 and "generation=0 " in first[0]
    assert f"log lines dropped count={2000 - len(first)} " in last[0] and last[1].endswith("goes on")
