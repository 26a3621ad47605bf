"""What a program says of the hook at its start: once, in one line."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hooked import LINEAR, Home, publish, published
from matrices import matrix


@pytest.mark.long
@pytest.mark.parametrize(
    ("stderr", "switch"),
    matrix(
        itertools.product(["closed", "a pipe that nobody reads", "full"], ["1", "yes"]),
        [("closed", "1"), ("a pipe that nobody reads", "yes"), ("full", "yes")],
    ),
)
def test_import_torch_works_whatever_stderr_is(home: Home, tmp_path: Path, switch: str, stderr: str) -> None:
    redirect = {"closed": "2>&-", "a pipe that nobody reads": "2> >(exec true)", "full": "2>/dev/full"}[stderr]
    command = (
        f"sleep 0.2; exec {sys.executable} -P -c 'import time; time.sleep(0.2); import torch; print(7)' {redirect}"
    )
    env = home.environment(GEMMTUNED=switch, GEMMTUNED_QUIET="0", GEMMTUNED_DB="/proc/none/tune.db")
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "7\n")


def test_a_start_says_once_that_it_is_on_unless_it_is_told_to_be_quiet(home: Home) -> None:
    home.path.mkdir()
    one_call = "import torch, gemmtuned; torch.mm(torch.ones(2, 2), torch.ones(2, 2)); gemmtuned.reload(); print(1)"
    before = home.run(one_call, GEMMTUNED_QUIET="0")
    assert "native, nothing tuned yet, home" in before.err
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 7)
    code = """
        import os, time, torch, gemmtuned
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        from hooked import wait_for
        wait_for(lambda: gemmtuned.generation() == 7)
        gemmtuned.reload()
        print(1)
        """
    loud, quiet = home.run(code, GEMMTUNED_QUIET="0"), home.run(code)
    again = code.replace(
        "print(1)", "[(gemmtuned.disable(), gemmtuned.enable(), gemmtuned.reload()) for _ in 'xx']; print(1)"
    )
    often = home.run(again, GEMMTUNED_QUIET="0")
    off_between = home.run(
        """
        import os, torch, gemmtuned
        gemmtuned.reload()
        for native in "01":
            os.environ["GEMMTUNED_NATIVE"] = native
            gemmtuned.disable(), gemmtuned.enable(), gemmtuned.reload()
        """,
        GEMMTUNED_QUIET="0",
    )

    misspelt = home.run(
        code, GEMMTUNED_QUIET="0", GEMMTUNED_FLUSCH_S="1", GEMMTUNED_NONSENSE="1", **{"GEMMTUNED_\x1b[31m": "1"}
    ).err

    version = json.loads(json.dumps(__import__("gemmtuned").__version__))
    assert quiet.err == ""
    assert misspelt.endswith(
        f"home {home.path} - GEMMTUNED_FLUSCH_S, set here, is no variable of gemmtuned's (GEMMTUNED_FLUSH_S?) "
        "- GEMMTUNED_NONSENSE, set here, is no variable of gemmtuned's (GEMMTUNED_QUIET=1 silences this)\n"
    )
    first, off, last = off_between.err.splitlines(keepends=True)
    assert "this program runs stock torch" in off and first == last == loud.err
    assert (
        loud.err
        == often.err
        == (f"gemmtuned {version}: native, generation 7, 1 rows, home {home.path} (GEMMTUNED_QUIET=1 silences this)\n")
    )


@pytest.mark.parametrize("by", ["the file", "GEMMTUNED_NATIVE"])
def test_a_start_says_once_that_it_is_switched_off_and_by_what(home: Home, by: str) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 7)
    env = {"GEMMTUNED_NATIVE": "0"} if by == "GEMMTUNED_NATIVE" else {}
    if not env:
        (home.path / "disabled").touch()
    code = """
        import torch, gemmtuned
        from hooked import wait_for
        wait_for(lambda: gemmtuned.generation() == 7)
        gemmtuned.reload()
        print(1)
        """
    said = home.run(code, GEMMTUNED_QUIET="0", **env).err

    off = "switched off by GEMMTUNED_NATIVE=0" if env else f"switched off: {home.path / 'disabled'} exists"
    assert said == (
        f"gemmtuned {__import__('gemmtuned').__version__}: {off}, this program runs stock torch "
        "(GEMMTUNED_QUIET=1 silences this)\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that nobody knows")
def test_a_user_without_a_home_folder_runs_on_stock_torch_and_is_told_in_words() -> None:
    run = "import torch, gemmtuned; gemmtuned.enable(); print(gemmtuned.status()['note'], gemmtuned.is_enabled())"

    def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], env={"GEMMTUNED": "1"}, user=424242, extra_groups=[], cwd="/",
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    try:
        if as_nobody("-c", "import torch").returncode:
            pytest.skip("this installation is closed to other users")
    except PermissionError:
        pytest.skip("this interpreter is closed to other users")
    done = as_nobody("-c", run)
    assert done.returncode == 0
    assert done.stdout.startswith("off: this user has no home folder") and done.stdout.endswith(
        "folder of your own False\n"
    )
    for command in ("status", "coverage", "db check", "doctor --quick"):
        said = as_nobody("-m", "gemmtuned", *command.split())
        assert "Traceback" not in said.stderr + said.stdout and said.returncode == (1 if "doctor" in command else 2)
        assert "set GEMMTUNED_HOME to a" in said.stderr + " ".join(said.stdout.split())
