"""What the doctor command finds out and says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_homes import small_home
from command_line import Cli

from gemmtuned.configs.settings import unknown_variables
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.reports import checks_host


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return small_home(tmp_path)


def test_doctor_says_where_no_native_hook_can_be_built_and_no_table_published(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def found(**env: str) -> dict[str, dict[str, str]]:
        return {
            check["name"]: check for check in json.loads(call("doctor", "--quick", "--json", **env).stdout)["checks"]
        }

    for cache, why in (
        ("file", "file is a file"),
        ("file/cache", "file is a file"),
        ("/proc/x", "/proc takes no folder"),
    ):
        native = found(GEMMTUNED_CACHE=str(tmp_path / cache))["native hook"]
        assert native["result"] == "WARN" and why in native["found"] and "set GEMMTUNED_CACHE" in native["fix"]
    assert found(GEMMTUNED_CACHE=str(tmp_path / "cache"))["native hook"]["result"] == "WARN"
    assert not (tmp_path / "cache").exists()
    for folder in ("file", "file/configs"):
        tables = found(GEMMTUNED_CONFIG_DIR=str(tmp_path / folder))["published tables"]
        assert tables["result"] == "FAIL" and "file is a file" in tables["found"]
        assert "set GEMMTUNED_CONFIG_DIR" in tables["fix"]


def test_doctor_reports_every_part(call: Cli, home: Path) -> None:
    done = call("doctor", "--quick", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    parsed = json.loads(done.stdout)
    found = {check["name"]: check for check in parsed["checks"]}
    assert found["autoload"]["result"] == "FAIL" and "gemmtuned run" in found["autoload"]["fix"]
    assert done.returncode == 1
    assert found["database"]["result"] == "PASS"
    assert found["published tables"]["result"] == "PASS"
    parts = {"python", "torch", "entry point", "native hook", "home", "file system", "disk", "sqlite", "inotify"}
    assert parts | {"daemon", "programs"} <= set(found)
    assert {row["name"] for row in parsed["settings"]} == {variable.name for variable in VARIABLES}


def test_doctor_shows_what_is_wrong_last_and_of_variables_those_that_are_set(call: Cli, home: Path) -> None:
    lines = call("doctor", "--quick").stdout.splitlines()
    every = call("doctor", "--quick", "--variables").stdout

    results = [word for line in lines if (word := line[:4]) in ("PASS", "WARN", "FAIL")]
    assert results == sorted(results, key=("PASS", "WARN", "FAIL").index) and "WARN" in results
    assert "warned" in lines[-1] and lines[-2].startswith(results[-1])
    named = [variable.name for variable in VARIABLES if any(line.startswith(f"{variable.name} ") for line in lines)]
    assert "GEMMTUNED_HOME" in named and "GEMMTUNED_IDLE_S" not in named
    assert all(variable.name in every and variable.meaning in every for variable in VARIABLES)


def test_doctor_names_misspelled_variables_and_what_is_probably_meant(call: Cli) -> None:
    wrong = {"GEMMTUNED_HOMES": "1", "GEMMTUNED_TUNE_GEMM": "1", "gemmtuned_idle_s": "1", "GEMMTUNED_WHATEVER": "1"}

    found = json.loads(call("doctor", "--quick", "--json", **wrong).stdout)["checks"]
    right = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]

    said = {check["found"].split()[0]: check for check in found if check["name"] == "variables"}
    assert {check["result"] for check in said.values()} == {"WARN"}
    assert {name: "or set" in check["fix"] and check["fix"].split()[4] for name, check in said.items()} == {
        "GEMMTUNED_HOMES": "GEMMTUNED_HOME", "GEMMTUNED_TUNE_GEMM": "AITER_TUNE_GEMM",
        "gemmtuned_idle_s": "GEMMTUNED_IDLE_S", "GEMMTUNED_WHATEVER": False,
    }  # fmt: skip
    assert "variables" not in {check["name"] for check in right}


def test_near_misses_of_aiters_switches_are_named_and_aiters_own_variables_are_not() -> None:
    misses = {"AITER_TUNE_GEMMM": "AITER_TUNE_GEMM", "aiter_tune_gem": "AITER_TUNE_GEMM"}
    own = ("AITER_REBUILD", "AITER_LOG_LEVEL", "AITER_ONLINE_TUNE", "AITER_CONFIG_GEMM_A4W8", "AITER_LOG_MORE")

    assert unknown_variables(dict.fromkeys((*misses, *own, "AITER_TUNE_GEMM", "AITER_CONFIG_FMOE"), "1")) == misses


def test_a_name_that_begins_almost_as_ours_do_is_one_of_ours_misspelt() -> None:
    near = {
        "GEMTUNED": "GEMMTUNED", "GEMM_TUNED": "GEMMTUNED", "gemmtuned": "GEMMTUNED", "GEMTUNED_HOME": "GEMMTUNED_HOME",
        "GEMM_TUNE_RUN": "GEMMTUNED_RUN", "gemmtuned_home": "GEMMTUNED_HOME",
    }  # fmt: skip
    others = ("GEMMTUNED", "GEMMTUNED_HOME", "GEM_HOME", "GEMINI_API_KEY", "GEMM_TUNERS_X", "MY_GEMTUNED")
    assert unknown_variables(dict.fromkeys((*near, *others), "1")) == near


def test_what_kubernetes_sets_for_a_service_of_our_name_is_nobodys_mistake() -> None:
    port = "GEMMTUNED_PORT_9464_TCP"
    given = [f"GEMMTUNED_SERVICE_{name}" for name in ("HOST", "PORT", "PORT_METRICS")]
    given += ["GEMMTUNED_PORT", port, *(f"{port}_{name}" for name in ("PROTO", "PORT", "ADDR"))]
    given += ["GEMMTUNED_DAEMON_SERVICE_HOST", "GEMMTUNED_DAEMON_PORT"]  # a service gemmtuned-daemon

    assert unknown_variables(dict.fromkeys(given, "1")) == {}
    assert unknown_variables({"GEMMTUNED_SERVICE": "1", "GEMMTUNED_HOEM": "1"}).keys() == {
        "GEMMTUNED_SERVICE", "GEMMTUNED_HOEM"
    }  # fmt: skip


def test_each_wrong_variable_is_named_and_doctor_goes_on(call: Cli, home: Path) -> None:
    wrong = {"AITER_TUNE_GEMM": "yes", "GEMMTUNED_IDLE_S": "soon", "GEMMTUNED_TRUST": "nobody of this machine"}

    done = call("doctor", "--quick", "--json", **wrong)
    found = json.loads(done.stdout)["checks"]
    other = call("status", **wrong)

    said = [(check["result"], check["found"].split()[0]) for check in found if check["name"] == "variables"]
    assert done.returncode == 1 and sorted(said) == sorted(("FAIL", name) for name in wrong)
    assert {"home", "database", "programs"} <= {check["name"] for check in found}
    assert other.returncode == 2 and other.stderr.count("\n") == 1
    assert all(f"{name} must be" in other.stderr for name in wrong)


@pytest.mark.parametrize("place", ["file/home", "file", "/proc/home"])
def test_doctor_says_that_a_home_cannot_be_made_and_why(call: Cli, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / place  # of two absolute paths the second

    found = {
        check["name"]: check
        for check in json.loads(call("doctor", "--quick", "--json", GEMMTUNED_HOME=str(home)).stdout)["checks"]
    }

    assert found["home"]["result"] == "FAIL"
    assert found["home"]["found"].startswith(f"{home} cannot be ")
    assert ("Not a directory" if "file" in place else "/proc takes no folder") in found["home"]["found"]
    assert "set GEMMTUNED_HOME" in found["home"]["fix"]
    assert not {"disk", "file system", "published tables", "database", "programs"} & set(found)


@pytest.mark.parametrize(("files", "result"), [((1000, 0, 0), "FAIL"), ((1000, 9, 9), "PASS"), ((0, 0, 0), "PASS")])
def test_a_disk_with_room_and_without_inodes_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[int, int, int], result: str
) -> None:
    facts = os.statvfs_result((4096, 4096, 1 << 24, 1 << 24, 1 << 24, *files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    assert checks_host._space(tmp_path).result == result


def test_doctor_leaves_nothing_in_the_home(call: Cli, tmp_path: Path) -> None:
    call("doctor", "--quick")
    assert not list(tmp_path.iterdir())
    (tmp_path / "home").mkdir()
    call("doctor", "--quick")
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("command", [["doctor", "--quick"], ["status"], ["coverage"], ["daemon", "--once"]])
def test_a_home_in_a_folder_that_is_closed_to_us_is_said_in_one_line(
    call: Cli, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")  # as one without permission, which root always has

    done = call(*command, GEMMTUNED_HOME=str(tmp_path / "loop/home"))

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Set GEMMTUNED_HOME to a folder of your own" in done.stderr


def test_tables_in_a_folder_that_is_closed_to_us_are_no_traceback(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    done = call("doctor", "--quick", "--json", GEMMTUNED_CONFIG_DIR=str(tmp_path / "loop/configs"))

    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}["published tables"]
    assert found["result"] == "FAIL" and "manifest.json: cannot be read (" in found["found"]


def test_doctor_says_who_may_write_the_published_tables(call: Cli, home: Path) -> None:
    (home / "configs").chmod(0o777)

    found = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]

    tables = next(check for check in found if check["name"] == "published tables")
    assert tables["result"] == "FAIL" and "chmod go-w" in tables["found"]
    assert tables["fix"].startswith("the command in the line")
