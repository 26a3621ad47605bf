"""The units, the tmpfiles.d file and the container recipe of docs/: checked by the tools themselves where they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gemmtuned.configs import settings
from gemmtuned.daemon.device.device_lock import DeviceLock

DOCS = Path(__file__).parents[2] / "docs"
SYSTEM, USER, TMPFILES = (
    DOCS / "systemd" / f"gemmtuned{end}" for end in (".service", "-user.service", "-tmpfiles.conf")
)
CONTAINERFILE, COMPOSE = DOCS / "container" / "Containerfile", DOCS / "container" / "compose.yaml"
FOLDER = "/run/lock/gemmtuned"


def systemd(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}, which is not installed here")
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **more)


def runnable(unit: Path, folder: Path) -> Path:
    """The unit with a program that is there: `verify` looks for it."""
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text())
    copy = folder / "gemmtuned.service"
    copy.write_text(text)
    return copy


@pytest.mark.parametrize("unit", [SYSTEM, USER], ids=["system", "user"])
def test_systemd_understands_every_line_of_a_unit(unit: Path, tmp_path: Path) -> None:
    user = ["--user"] if unit == USER else []
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = systemd("systemd-analyze", "verify", "--man=no", *user, str(runnable(unit, tmp_path)), env=env)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "gemmtuned" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr
    broken = runnable(unit, tmp_path)
    broken.write_text(broken.read_text().replace("[Service]", "[Service]\nNoSuchLine=1"))
    done = systemd("systemd-analyze", "verify", "--man=no", *user, str(broken), env=env)
    assert "NoSuchLine" in done.stderr, "and it would say so"


@pytest.mark.parametrize(("unit", "most"), [(SYSTEM, 20), (USER, 70)], ids=["system", "user"])
def test_a_unit_is_as_closed_as_the_docs_say(unit: Path, most: int, tmp_path: Path) -> None:
    done = systemd(
        "systemd-analyze", "security", "--offline=true", f"--threshold={most}", str(runnable(unit, tmp_path))
    )
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("systemd-analyze here cannot look at a file (before 250)")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found and float(found[1]) <= most / 10 and done.returncode == 0, done.stdout[-300:]
    assert f"`systemd-analyze security`: {found[1]}" in (DOCS / "daemon.md").read_text()


def test_all_daemons_lock_devices_in_one_folder() -> None:
    for unit in (SYSTEM, USER):
        assert f"Environment=GEMMTUNED_DEVICE_LOCKS={FOLDER}\n" in unit.read_text()
    assert f"ReadWritePaths={FOLDER}\n" in SYSTEM.read_text()
    assert f"d {FOLDER} 1777 root root -\n" in TMPFILES.read_text()
    assert steps()["daemon"]["ENV"]["GEMMTUNED_DEVICE_LOCKS"] == FOLDER


def test_the_folder_is_made_and_open_to_all_users(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: the file says that root owns the folder")
    done = systemd("systemd-tmpfiles", "--create", f"--root={tmp_path}", str(TMPFILES))
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / FOLDER[1:]).stat().st_mode) == 0o1777


def test_a_daemon_that_is_told_nothing_takes_that_folder_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {FOLDER: 0o41777, "/run/lock": 0o41777, "/tmp": 0o41777}

    def stat_of(path: Path, **more: Any) -> Any:
        if str(path) not in there:
            raise FileNotFoundError(path)
        return os.stat_result((there[str(path)], *[0] * 9))

    monkeypatch.setattr(Path, "stat", stat_of)
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) in there)
    assert str(settings._shared_locks()) == FOLDER
    there[FOLDER] = 0o40755  # made by a container's engine, say
    assert str(settings._shared_locks()) == "/run/lock"
    del there[FOLDER]
    there["/run/lock"] = 0o40755  # Fedora
    assert str(settings._shared_locks()) == "/tmp"


def test_a_folder_of_locks_that_we_make_is_for_all_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = DeviceLock(tmp_path / "locks", "GPU-1", "me")
        assert lock.take() == ""
        lock.drop()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == 0o1777


def steps() -> dict[str, dict[str, Any]]:
    """Of each stage of the Containerfile: FROM, and the others as they add up."""
    stages: dict[str, dict[str, Any]] = {}
    now: dict[str, Any] = {}
    for line in CONTAINERFILE.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            before = stages.get(base, {"RUN": [], "ENV": {}})
            now = {**before, "FROM": base, "RUN": [*before["RUN"]], "ENV": dict(before["ENV"])}
            stages[name] = now
        elif word == "ENV":
            now["ENV"].update(pair.split("=", 1) for pair in rest.split())
        elif word == "RUN":
            now["RUN"].append(rest)
        elif word in ("ENTRYPOINT", "CMD"):
            now[word] = json.loads(rest)
        else:
            assert not word or word in ("ARG", "#", "STOPSIGNAL"), line
    return stages


def test_the_server_and_its_daemon_have_gemmtuned_one_home_and_see_each_other() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load(COMPOSE.read_text())
    serve, daemon = compose["services"]["serve"], compose["services"]["gemmtuned"]
    made = steps()
    for service in (serve, daemon):
        stage = made[service["build"]["target"]]
        assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert any("pip install" in run and "gemmtuned" in run for run in stage["RUN"])
        env = {**stage["ENV"], **service.get("environment", {})}
        assert f"gemmtuned:{env['GEMMTUNED_HOME']}" in service["volumes"]
        assert env["GEMMTUNED_CACHE"].startswith(f"{env['GEMMTUNED_HOME']}/"), "the server finds what the daemon builds"
    assert serve["environment"]["GEMMTUNED"] == "1" and "ENTRYPOINT" not in made["serve"], "its own entry point stays"
    assert serve["deploy"] == daemon["deploy"] and daemon["pid"] == "service:serve" and daemon["init"]
    locks = [v for v in daemon["volumes"] if isinstance(v, dict)]
    assert [(v["source"], v["target"], v["bind"]["create_host_path"]) for v in locks] == [(FOLDER, FOLDER, False)]
    assert "gemmtuned" in compose["volumes"]


def test_docker_reads_the_compose_file() -> None:
    done = systemd("docker", "compose", "-f", str(COMPOSE), "config", "--quiet")
    if "unknown" in done.stderr or "not a docker command" in done.stderr:
        pytest.skip("docker has no compose here")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_the_image_runs_is_a_daemon_that_stops_as_docker_stops_it(tmp_path: Path) -> None:
    image = steps()["daemon"]
    env = {**os.environ, **{name: f"{tmp_path}{path}" for name, path in image["ENV"].items()}}
    env |= {"GEMMTUNED_CACHE": str(tmp_path / "cache"), "GEMMTUNED_IDLE_S": "1000"}
    for path in image["ENV"].values():
        (tmp_path / path[1:]).mkdir(parents=True)
    command = [sys.executable, *image["ENTRYPOINT"][1:], *image["CMD"]]
    home = Path(env["GEMMTUNED_HOME"])
    daemon = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not (home / "daemon.json").exists() and time.monotonic() < until:
            assert daemon.poll() is None, daemon.stderr and daemon.stderr.read()
            time.sleep(0.05)
        second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 0 and "another daemon runs" in second.stderr
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(20) == 143
    finally:
        daemon.kill()
        said = daemon.communicate()[1]
    assert all(json.loads(line) for line in said.splitlines()), "its log is JSON, a line each"


def test_the_packages_that_the_image_installs_are_ours() -> None:
    for run in steps()["serve"]["RUN"]:
        words = shlex.split(run)
        assert words[:4] == ["python3", "-m", "pip", "install"]
        assert words[-1] == "gemmtuned[gpu]"
