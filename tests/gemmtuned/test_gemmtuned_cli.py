"""The command line as a user meets it: real processes, a real database, exit codes and what stands on which stream."""

from __future__ import annotations

import json
import os
import pty
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from command_homes import small_home
from command_line import HERE, TUNED, Cli, environment, solution

from gemmtuned.cli import COMMANDS, build
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.reports.comparison import DISTURBED, TOO_BUSY

READ = [
    ["coverage"],
    ["coverage", "--by", "run", "--weight", "calls"],
    ["coverage", "--by", "problem", "--weight", "flops", "--since", "7d"],
    ["untuned"],
    ["gains"],
    ["trials"],
    ["trials", str(TUNED)],
    ["status"],
    ["explain", str(TUNED)],
    ["explain", "8", "2048", "1024"],
    ["explain", "8x2048x1024"],
    ["db", "check"],
]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run `gemmtuned ARGS` as a process of its own, its home in tmp_path/home."""

    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gemmtuned", *args]
        env = environment(tmp_path / "home", **more)
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)

    return run


def ids(args: list[str]) -> str:
    return " ".join(args)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return small_home(tmp_path)


@pytest.mark.parametrize("args", READ, ids=ids)
def test_every_read_command_gives_plain_text_and_valid_json(call: Cli, home: Path, args: list[str]) -> None:
    text, done = call(*args), call(*args, "--json")

    assert (text.returncode, text.stderr) == (0, "")
    assert "\x1b" not in text.stdout and text.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    parsed = json.loads(done.stdout)
    assert parsed["schema"] == f"gemmtuned.{'db.check' if args[0] == 'db' else args[0]}/1"
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("args", [*READ, ["tune", "fp32:8x64x64,threads=1"]], ids=ids)
def test_a_home_that_is_a_file_is_told(call: Cli, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "home").write_text("")

    done = call(*args)

    assert done.returncode == 1 and "home is a file. Move it away, or set GEMMTUNED_HOME" in done.stderr


def test_a_daemon_tells_a_home_below_a_file(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = call("daemon", "--once", GEMMTUNED_HOME=str(tmp_path / "file" / "home"))

    assert (
        done.returncode == 1 and f"({tmp_path / 'file'} is a file). Move it away, or set GEMMTUNED_HOME" in done.stderr
    )


@pytest.mark.parametrize("args", READ, ids=ids)
def test_every_read_command_works_before_there_is_a_database_and_makes_none(
    call: Cli, tmp_path: Path, args: list[str]
) -> None:
    text, parsed = call(*args), call(*args, "--json")

    assert (text.returncode, parsed.returncode) == (0, 0)
    assert "No database yet at" in text.stdout and "gemmtuned run" in text.stdout
    tables = [value for key, value in json.loads(parsed.stdout).items() if isinstance(value, list) and key != "notes"]
    assert all(table == [] for table in tables)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("args", READ, ids=ids)
def test_json_has_the_same_keys_before_there_is_a_database(call: Cli, home: Path, args: list[str]) -> None:
    after = json.loads(call(*args, "--json").stdout)
    before = json.loads(call(*args, "--json", GEMMTUNED_DB="/nowhere/tune.db").stdout)

    assert before.keys() | {"database"} == after.keys() | {"database"}


def test_a_size_below_1_is_told_as_that(call: Cli) -> None:
    for args in (
        ["explain", "-8", "2048", "512"],
        ["explain", "0", "2048", "512"],
        ["tune", "8", "-1", "4"],
        ["withdraw", "8x-1x4"],
        ["withdraw", "--dry-run", "-8x2048x512"],
        ["trials", "8", "0", "4"],
    ):
        done = call(*args)
        assert done.returncode == 2 and "M, N and K are 1 or more" in done.stderr, args
    assert call("withdraw", "--reason", "-5", "9", "9", "9").returncode == 1, "an option's value is no size"


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["coverage", "--by", "colour"],
        ["coverage", "--since", "yesterday"],
        ["untuned", "--limit", "-1"],
        ["trials", "not a problem"],
        ["explain", "8", "2048"],
        ["explain"],
        ["withdraw", "8", "9"],
        ["withdraw"],
        ["pin"],
        ["forget", "nonsense"],
        ["rollback", "--generation", "-1"],
        ["pause", "--for", "soon"],
        ["daemon", "--hours", "late"],
        ["daemon", "--budget", "0"],
        ["daemon", "--once", "--devices", "cuda:99"],
        ["withdraw", "fp32:8x8"],
        ["tune", "--space", "waves=3"],
        ["tune", "--libtype", "cutlass"],
        ["tune", "--tp", "8"],
        ["tune", "fp33:8x8x8"],
        ["tune", "-i", "missing.csv"],
        ["run"],
        ["run", "no-such-program-anywhere"],
        ["compare", "--figure", "(", "--", "python"],
        ["compare", "--figure", "none", "--", "python"],
        ["daemon", "--log-level", "loud"],
        ["db"],
    ],
    ids=ids,
)
def test_wrong_usage_ends_with_2_and_says_what(call: Cli, args: list[str]) -> None:
    done = call(*args)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip() or args == ["db"]


def test_a_wrong_variable_is_named_on_one_line(cli: Cli) -> None:
    done = cli("status", GEMMTUNED_IDLE_S="soon")

    assert done.returncode == 2
    assert done.stderr == "gemmtuned: GEMMTUNED_IDLE_S must be a number of seconds, got 'soon'\n"


def test_wrong_usage_of_the_real_command_ends_with_2(cli: Cli) -> None:
    done = cli("coverage", "--by", "colour")

    assert (done.returncode, done.stdout) == (2, "")
    assert "'colour' is not one of family, device, run, problem" in done.stderr


def test_version_is_that_of_the_package(cli: Cli) -> None:
    import gemmtuned

    assert cli("--version").stdout == f"gemmtuned {gemmtuned.__version__}\n"


def test_status_imports_nothing_heavy(cli: Cli, home: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['status', '--json']; from gemmtuned.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'sqlite_utils', 'triton', 'rich', 'watchdog', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(home), timeout=60
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_run_switches_the_hook_on_and_keeps_the_programs_exit_code(cli: Cli, tmp_path: Path) -> None:
    names = ("GEMMTUNED", "AITER_TUNE_GEMM", "TORCH_DEVICE_BACKEND_AUTOLOAD", "GEMMTUNED_RUN", "GEMMTUNED_DISPATCH")
    script = tmp_path / "serve.py"
    script.write_text(f"import os, sys; print([os.environ.get(n) for n in {names}], sys.argv[1:]); sys.exit(7)")

    done = cli(
        "run", "--run-label", "nightly", "--capture-only", "serve.py", "--port", "3", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    plain = cli("run", sys.executable, "serve.py")

    assert (done.returncode, done.stdout) == (7, "['1', None, '1', 'nightly', '0'] ['--port', '3']\n")
    assert (plain.returncode, plain.stdout) == (7, "['1', None, '1', None, None] []\n")


FAKE = """
import os
import re
on = os.environ["GEMMTUNED"] == "1" and os.environ["GEMMTUNED_DISPATCH"] == "1"
print("tokens/s: 1"); print(f"tokens/s: {150 if on else 100}")
"""


@pytest.mark.long
@pytest.mark.parametrize("installed", [True, False])
def test_where_aiter_is_installed_run_sets_our_switch_alone_and_doctor_says_why(
    cli: Cli, tmp_path: Path, installed: bool
) -> None:
    if installed:
        (tmp_path / "aiter").mkdir()
        (tmp_path / "aiter/__init__.py").write_text("raise ImportError('never imported by us')")
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ['GEMMTUNED'], os.environ.get('AITER_TUNE_GEMM'))")
    ran = cli("run", "--", sys.executable, str(program), AITER_TUNE_GEMM="1", PYTHONPATH=str(tmp_path))
    checked = cli("doctor", "--quick", AITER_TUNE_GEMM="1", PYTHONPATH=str(tmp_path))

    assert ran.stdout.split() == (["1", "None"] if installed else ["1", "1"])
    assert ("AITER is installed" in ran.stderr) == installed
    assert ("AITER is installed" in checked.stdout) == installed


@pytest.mark.long
def test_compare_reads_the_figure_a_program_prints(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(FAKE)

    done = cli(
        "compare", "--rounds", "5", "--no-warm-up", "--figure", r"tokens/s: ([0-9.]+)", "--json", "--", "bench.py"
    )

    parsed = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert {row["arm"]: row["median"] for row in parsed["arms"]} == {"off": 100, "capture": 100, "on": 150}
    busy = statistics.median(parsed["others"]) > DISTURBED
    assert parsed["arms"][2]["ratio"] == 1.5 and parsed["arms"][2]["verdict"] == (TOO_BUSY if busy else "better")
    assert parsed["arms"][1]["verdict"] == (TOO_BUSY if busy else "within noise")
    assert parsed["hits"] == {"solution_calls": 0, "calls": 0}


@pytest.mark.long
def test_compare_reads_a_key_of_the_json_a_program_prints(cli: Cli, tmp_path: Path) -> None:
    line = """import json; print(json.dumps({"speed": {"ms": 200 if on else 400}})); print("{not json"); print("[1]")"""
    (tmp_path / "bench.py").write_text(FAKE + line)

    arguments = ("--rounds", "5", "--no-warm-up", "--key", "speed.ms", "--lower-is-better", "--json")
    parsed = json.loads(cli("compare", *arguments, "--", "bench.py").stdout)

    assert {row["arm"]: row["median"] for row in parsed["arms"]} == {"off": 400, "capture": 400, "on": 200}
    assert (parsed["unit"], parsed["arms"][2]["ratio"]) == ("speed.ms", 2)
    both = cli("compare", "--key", "a", "--figure", "(x)", "--", "bench.py")
    assert both.returncode == 2 and "give one" in both.stderr


@pytest.mark.long
def test_compare_says_when_it_cannot_tell(cli: Cli) -> None:
    done = cli("compare", "--rounds", "2", "--no-warm-up", "--", sys.executable, "-c", "pass")

    assert done.returncode == 0
    assert "cannot tell a gain from noise" in done.stdout
    assert done.stderr.startswith(f"gemmtuned: 6 runs of {sys.executable} -c pass: 2 of each arm\n")


@pytest.mark.parametrize(
    ("code", "said"), [("import sys; print('boom'); sys.exit(3)", "ended with 3"), ("print('x')", "nothing it printed")]
)
def test_compare_fails_when_the_program_does(cli: Cli, code: str, said: str) -> None:
    done = cli("compare", "--figure", "f=([0-9]+)", "--", sys.executable, "-c", code)

    assert done.returncode == 1
    plan, error = done.stderr.splitlines()
    assert "16 runs of" in plan and "one to warm up" in plan
    assert said in error


def test_a_reader_who_has_seen_enough_is_no_error(home: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gemmtuned", "gains"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment(home), timeout=60)
    os.close(write)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_styles_unless_no_color_is_set(home: Path, no_color: str, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    env = environment(home, TERM="xterm-256color", NO_COLOR=no_color, COLUMNS="200")
    done = subprocess.run([sys.executable, "-m", "gemmtuned", "gains"], stdout=theirs, env=env, timeout=60)
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        out += part
    os.close(ours)

    assert done.returncode == 0
    assert (b"\x1b[" in out) is coloured


def test_tune_names_bad_rows_and_takes_none_of_them_for_good(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("M,N,K,bias,dtype\n8,64,64,False,torch.bfloat16\n8,64,x,False,torch.bfloat16\n")

    refused = call("tune", "-i", "u.csv", "--dry-run")
    skipped = call("tune", "-i", "u.csv", "--dry-run", "--skip-bad-rows", "--threads", "2", "--json")

    assert refused.returncode == 2
    assert "u.csv line 3, column K: 'x' is not a whole number" in refused.stderr
    assert "Bad rows in all: 1; --skip-bad-rows tunes the 1 problem of the others\n" in refused.stderr
    assert skipped.returncode == 0
    assert [row["problem"] for row in json.loads(skipped.stdout)["rows"]] == ["bf16:8x64x64,threads=2"]


def test_tune_of_a_file_without_a_good_row_says_so(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("M,N,K,bias,dtype\n-3,64,64,False,torch.bfloat16\n8,64,x,False,torch.bfloat16\n")

    refused = call("tune", "-i", "u.csv", "--dry-run")

    assert refused.returncode == 2
    assert "u.csv line 2, column M: '-3' must be 1 or more. Bad rows in all: 2; no row is good" in refused.stderr
    assert "--skip-bad-rows" not in refused.stderr


@pytest.mark.parametrize("args", [["status"], ["gains"], ["db", "check"], ["daemon", "--once"], ["retune", "8x64x64"]])
def test_a_database_that_is_a_folder_is_told(call: Cli, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "folder").mkdir()

    done = call(*args, GEMMTUNED_DB=str(tmp_path / "folder"))
    doctor = json.loads(call("doctor", "--quick", "--json", GEMMTUNED_DB=str(tmp_path / "folder")).stdout)

    said = f"{tmp_path / 'folder'}: a folder, no database. Set GEMMTUNED_DB to a file"
    assert done.returncode == 1 and said in done.stdout + done.stderr
    (database,) = (check for check in doctor["checks"] if check["name"] == "database")
    assert database["result"] == "FAIL" and database["found"].startswith(said)


def test_help_has_the_first_line_of_each_command_and_imports_none(call: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["gemmtuned.commands"]
    for name in [name for name in sys.modules if name.startswith("gemmtuned.commands.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(package, name.rpartition(".")[2])  # and put back: other tests patch what the package names
    shown = call("--help").stdout
    assert not [name for name in sys.modules if name.startswith("gemmtuned.commands.")]

    commands = typer.main.get_command(build()).commands  # type: ignore[attr-defined]
    assert list(commands) == list(COMMANDS)
    for name, command in commands.items():
        line = COMMANDS[name].line
        assert f"  {name:10s}{line}\n" in shown
        assert command.help.split("\n\n")[0].replace("\n", " ").startswith(line), name


_PLURALS = (
    "calls|candidates|devices|errors|failures|files|kernels|models|places|problems|programs|rows|runs|seeds|shapes|solutions|"
    "weights"
)


@pytest.mark.parametrize(
    "words",
    [
        ("status",), ("coverage",), ("coverage", "--by", "layer"), ("untuned",), ("gains",), ("trials",),
        ("doctor", "--quick"), ("explain", "8", "64", "64"), ("export", "--format", "aiter", "--out", "one.csv"),
        ("retune", "8", "64", "64"), ("pin", "8", "64", "64"), ("forget", "8", "64", "64"), ("import", "one_row.csv"),
        ("import", "one_row.csv", "--dry-run"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_one_is_no_plural(tmp_path: Path, call: Cli, words: tuple[str, ...]) -> None:
    from gemmtuned.daemon.publishing.publish import publish
    from gemmtuned.db.store import Store

    (tmp_path / "one_row.csv").write_text("M,N,K\n8,64,128\n")
    only, now_s = Problem(m=8, n=64, k=64, threads=2), time.time()
    folder = tmp_path / "home"
    folder.mkdir()
    store = Store(folder / "tune.db", locks=folder / "locks")
    store.sightings.add("serve", HERE, [Sighting(only, "exact", 1)], now_s=now_s)
    store.solutions.install(None, [solution(only)], environment=HERE, now_s=now_s)
    publish(store, folder / "configs", folder / "locks", now_s=now_s)
    store.close()

    done = call(*words)

    assert not re.findall(rf"\b1 (?:{_PLURALS})\b.*", done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_coverage_says_first_that_it_is_off(home: Path, call: Cli) -> None:
    (home / "disabled").touch()

    assert call("coverage").stdout.startswith("SWITCHED OFF: ")
    assert call("status").stdout.startswith("SWITCHED OFF: ")


def test_coverage_without_calls_says_that_the_hook_is_not_built(tmp_path: Path, call: Cli) -> None:
    empty = {"GEMMTUNED_CACHE": str(tmp_path / "empty")}

    assert call("coverage", **empty).stdout.startswith("The native hook is not built yet")


@pytest.mark.parametrize(
    "args", [["--version"], ["--help"], ["tune", "--help"], ["status"], ["untuned", "--json"]], ids=ids
)
def test_output_that_cannot_be_written_is_one_sentence(home: Path, args: list[str]) -> None:
    command = [sys.executable, "-m", "gemmtuned", *args]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(home), timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "gemmtuned: the output cannot be written (No space left on device)\n"

    read_fd, write_fd = os.pipe()
    os.close(read_fd)  # as `| head` does once it has seen enough
    with open(write_fd, "w") as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment(home), timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")
