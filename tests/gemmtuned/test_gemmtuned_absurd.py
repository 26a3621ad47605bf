"""Nothing that a person types, sets or leaves lying ends in a traceback, and every JSON has its keys in every state."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import NEW, found, new_store, open_store, problem, saw
from typer._click.core import Command
from typer._click.exceptions import ClickException
from typer.main import get_command
from typer.testing import CliRunner

from gemmtuned.cli import build
from gemmtuned.configs.errors import CandidateFailed, GemmtunedError, SettingError
from gemmtuned.configs.rows_config import read_rows
from gemmtuned.configs.settings import Settings, trusted_uid, watchdog_s
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.daemon.service.main import Tuned
from gemmtuned.daemon.service.rules import Rules, moment, paused_until
from gemmtuned.daemon.status_file import Notice, read_notice, write_notice
from gemmtuned.db import migrations
from gemmtuned.reports import unseen

Run = Callable[..., Any]
ABSURD = (
    "", "-1", "99999999999999999999", "9" * 5000, "1e400", "nan", "1e18", "\u00b2", "\udcff", "a" * 5000,
    "[red]\x1b[31m", "8x8", "0x0x0", "fp32:8x8x8,threads=99999999999999999999", "bf16:9999999999x1x1", "99999999w",
    "~nosuchuser/x", "\u0663", "1_0",
)  # fmt: skip
NO_NUMBERS = ("\u0663", "1_0", " 5", "5 ", "\u00b2", "nan", "inf", "0x8", "5\n", "9" * 5000, "--5", "1e999", "five")
READERS = (
    ("coverage",), ("coverage", "--by", "problem"), ("coverage", "--by", "run"), ("untuned",), ("gains",),
    ("gains", "--all"), ("trials",), ("explain", "8", "1024", "512"), ("status",), ("db", "check"),
    ("doctor", "--quick"),
)  # fmt: skip
WORKS = (
    "run",
    "compare",
    "daemon",
    "tune",
    "demo",
    "top",
    "doctor",
    "import",
    "report",
    "sync",
    "fleet",
)  # not run here


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("GEMMTUNED_HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def run(home: Path) -> Run:
    """Run a command in this process; what it raises, but for its end, is raised here."""
    runner, app = CliRunner(), build()

    def call(*words: str, codes: tuple[int, ...] = (0, 1, 2, 75), stderr: bool = False) -> str:
        result = runner.invoke(app, list(words))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(words) from result.exception
        assert result.exit_code in codes, (words, result.output)
        return result.output if stderr else result.stdout

    return call


def fill(home: Path) -> None:
    store = new_store(home)
    now_s = time.time()
    store.sightings.add("serve", NEW, [saw(problem(), 100), saw(problem(16), 10), saw(problem(k=64))], now_s=now_s)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=now_s)
    store.close()


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Command]]:
    for name, one in getattr(command, "commands", {}).items():
        if hasattr(one, "commands"):
            yield from commands(one, *words, name)
        else:
            yield (*words, name), one


ALL = dict(commands(get_command(build())))


@pytest.mark.part(8)
@pytest.mark.parametrize("words", [words for words in ALL if words[0] not in WORKS], ids=" ".join)
def test_no_argument_ends_in_a_traceback(run: Run, home: Path, words: tuple[str, ...]) -> None:
    fill(home)
    command = ALL[words]
    takes = [p for p in command.params if p.param_type_name == "argument"]
    needed = ("8x1024x512",) if takes and words[0] != "db" else ()
    for param in command.params:
        for value in ABSURD:
            if param.param_type_name == "argument":
                run(*words, "--", value)
            elif not getattr(param, "is_flag", False) and param.opts[0] != "--help":
                run(*words, *needed, f"{param.opts[0]}={value}")


# What is behind these takes minutes or does not end: it is left out here, and all before it runs
BEHIND: dict[str, tuple[tuple[str, ...], ...]] = {
    "daemon": (("gemmtuned.daemon.service.main", "run_daemon"),),
    "tune": (("gemmtuned.daemon.service.main", "tune_now"), ("gemmtuned.commands.tune", "_check")),
    "demo": (("gemmtuned.demo.loop", "run"), ("gemmtuned.commands.demo", "build_before")),
    "run": (("os", "execvpe"), ("gemmtuned.commands.run", "build_before")),
    "compare": (("gemmtuned.commands.compare", "_run"), ("gemmtuned.commands.compare", "build_before")),
    "import": (),
    "report": (),
}
NEEDED = {
    "tune": ("fp32:8x64x64,threads=1",), "run": ("true",), "compare": ("--rounds=1", "true"), "import": ("table.csv",),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.part(3)
@pytest.mark.parametrize("name", list(BEHIND))
def test_no_argument_of_what_works_long_ends_in_a_traceback(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fill(home)
    (home.parent / "table.csv").write_text("M,N,K,libtype,solidx,kernelName,us\n8,1024,512,triton,0,x,5.0\n")

    def reached(*args: object, **options: object) -> None:
        raise SystemExit(0)

    for module, what in BEHIND[name]:
        monkeypatch.setattr(f"{module}.{what}", reached)
    command = ALL[(name,)]
    for param in command.params:
        for value in ABSURD:
            if "\0" in value:
                continue
            if param.param_type_name == "argument":
                run(name, "--", value)
            elif not getattr(param, "is_flag", False) and param.opts[0] != "--help":
                first = (f"{param.opts[0]}={value}",)
                run(name, *first, *NEEDED.get(name, ()))


@pytest.mark.long
@pytest.mark.parametrize("words", [("import",), ("tune", "-i"), ("import", "--dry-run")], ids=" ".join)
def test_no_file_that_is_named_ends_in_a_traceback(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    fill(home)
    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", lambda *a, **how: Tuned())
    for name in ("table.csv", "table.jsonl", "table.json", "config.json"):
        for content in (*FILES, b"M,N,K\n", b"M,N,K\n1e400,-1,nan\n", b"M,N,K\n" + b"9" * 5000 + b",1,1\n"):
            (home.parent / name).write_bytes(content)
            run(*words, name)
            run("tune", f"--model-dir={home.parent}")


@pytest.mark.parametrize("words", list(ALL), ids=" ".join)
def test_every_option_reads_or_refuses_whatever_it_is_given(home: Path, words: tuple[str, ...]) -> None:
    command = ALL[words]
    for param in command.params:
        if param.param_type_name == "argument" or getattr(param, "is_flag", False):
            continue
        for value in ABSURD:
            with suppress(ClickException, GemmtunedError):
                command.make_context(words[-1], [f"{param.opts[0]}={value}"])  # reads all, and runs nothing


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES] + ["WATCHDOG_USEC", "WORLD_SIZE", "RANK"])
def test_every_variable_is_read_or_refused_by_name(name: str, home: Path) -> None:
    for value in (*ABSURD, "\0", "1:2:3", "a" * 300 + "/b"):
        env = {"GEMMTUNED_HOME": str(home), name: value}
        try:
            Settings.from_env(env)
            trusted_uid(env)
            watchdog_s(env)
        except SettingError as err:
            assert name in str(err)


@pytest.mark.long
def test_variables_do_not_end_commands_in_a_traceback(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(home)
    for variable in VARIABLES:
        for value in ("\u00b2", "-1", "nan", "a" * 300, "/dev/null/x", "~nosuchuser/x"):
            with monkeypatch.context() as patch:
                patch.setenv(variable.name, value)
                run("status")


def test_a_negative_number_of_seconds_is_called_a_number() -> None:
    with pytest.raises(SettingError, match="0 or more seconds"):
        Settings.from_env({"GEMMTUNED_FLUSH_S": "-1"})
    with pytest.raises(SettingError, match="must be a number"):
        Settings.from_env({"GEMMTUNED_FLUSH_S": "soon"})


NUMERIC_VARIABLES = ("GEMMTUNED_IDLE_S", "GEMMTUNED_FLUSH_S", "GEMMTUNED_LIVE_CHECK", "GEMMTUNED_GRAPH_WAIT_S")


def test_a_variable_that_is_a_number_takes_decimal_digits_alone(home: Path) -> None:
    """Python's own int() and float() take digits of any script, underscores and spaces."""
    names = [name for name in (v.name for v in VARIABLES) if name in NUMERIC_VARIABLES]
    assert len(names) == len(NUMERIC_VARIABLES)
    for name in names:
        assert Settings.from_env({"GEMMTUNED_HOME": str(home), name: "5"})
        for text in NO_NUMBERS:
            with pytest.raises(SettingError, match=name):
                Settings.from_env({"GEMMTUNED_HOME": str(home), name: text})
    for text in NO_NUMBERS:
        with pytest.raises(SettingError, match="GEMMTUNED_TRUST"):
            trusted_uid({"GEMMTUNED_TRUST": text})
        assert watchdog_s({"WATCHDOG_USEC": text}) is None
        here = Settings.from_env({"GEMMTUNED_HOME": str(home), "WORLD_SIZE": text, "RANK": "1"})
        assert (here.rank, here.reload) == (None, "auto")


@pytest.mark.parametrize("words", list(ALL), ids=" ".join)
def test_an_option_that_is_a_number_takes_decimal_digits_alone(home: Path, words: tuple[str, ...]) -> None:
    """Each option that takes `5` and refuses `five` is one."""
    command = ALL[words]

    def takes(option: str, text: str) -> bool:
        try:
            command.make_context(words[-1], [f"{option}={text}"], resilient_parsing=False)
        except ClickException as err:
            return "nvalid value" not in str(err.message) and "is not a" not in str(err.message)
        except GemmtunedError:
            return False
        return True

    for param in command.params:
        if param.param_type_name == "argument" or getattr(param, "is_flag", False):
            continue
        option = param.opts[0]
        if takes(option, "5") and not takes(option, "five"):
            assert [text for text in NO_NUMBERS if text == text.strip() and takes(option, text)] == [], option


FILES: tuple[bytes, ...] = (
    b"", b"inf", b"nan", b"1e18", b"1e400", b"9" * 400, b"9" * 5000,
    b"\xff\xfe\x00", "\u00b2".encode(), b"[" * 100_000, b"{}", b"7",
    b'{"owner": 7}', b'{"owner": "\xc2\xb2:\xc2\xb2:1.2.3"}', b'{"pid": ' + b"9" * 5000 + b"}",
)  # fmt: skip


SMALL = ("paused", "daemon.json", "disabled", "budget")


@pytest.mark.parametrize("name", SMALL)
def test_small_files_of_absurd_content_are_read_or_passed_over(run: Run, home: Path, name: str) -> None:
    fill(home)
    for number, content in enumerate(FILES):
        (home / name).write_bytes(content)
        if (number + SMALL.index(name)) % 2:  # each content in two of the files
            run("status", codes=(0,))
        rules = Rules(budget_s=60.0)
        rules.remember(home)
        assert isinstance(rules.why_not(time.time(), home), str)
    (home / name).unlink()
    os.mkfifo(home / name)  # to open one waits for a writer
    run("status", codes=(0,))
    Rules().remember(home)


KINDS: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "garbage": lambda path: path.write_bytes(b'{"a": [\xff\x00' + b"9" * 6000),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("/nonexistent/x"),
    "pipe": os.mkfifo,
}
PLACES = (
    "configs/manifest.json", "tune.db", "tune.db-wal", "locks/tune.db.lock", "locks/publish.lock", "locks", "configs",
    "configs/bin", "paused", "disabled", "budget", "daemon.json", "checked", "ingest", "ingest/ingest.db", "host",
    ".salvage-tune.db", ".salvage-tune.db/new.db", ".salvage-tune.db/report.json",
)  # fmt: skip
WRITERS = (
    ("pause",), ("resume",), ("db", "publish"), ("withdraw", "8x1024x512"), ("rollback", "--generation", "0"),
    ("retune", "8", "1024", "512"), ("forget", "8x1024x512"), ("db", "backup", "b.db"), ("db", "vacuum"),
    ("export", "--format", "gemmtuned", "--out", "out"), ("report", "--out", "r.html"),
)  # fmt: skip


def put(path: Path, make: Callable[[Path], object]) -> None:
    """Something else in the place of what lies there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


@pytest.mark.parametrize("kind", ["pipe", "garbage", "deep"])
@pytest.mark.parametrize("place", ["configs/manifest.json", ".salvage-tune.db/report.json", "daemon.json"])
def test_what_lies_in_the_place_of_our_file_holds_nobody_up(run: Run, home: Path, place: str, kind: str) -> None:
    """To open a pipe waits for its other end, for ever: pytest's own time limit would show it."""
    fill(home)
    put(home / place, KINDS[kind])
    if place.startswith(".salvage"):
        put(home / ".salvage-tune.db/new.db", Path.touch)
        assert "cannot be ended. Move" in run("pin", "8x1024x512", codes=(1,), stderr=True)
    run("status")


def test_json_that_is_nested_too_deeply_is_none() -> None:
    """Its error is no ValueError."""
    deep = "[" * 4000
    assert Candidate("triton", deep).kernel == ""
    assert unseen._read(deep) == {}
    with pytest.raises(CandidateFailed):
        read_rows(deep)


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(KINDS))
def test_whatever_lies_in_the_place_of_any_file_of_ours_ends_no_command_in_a_traceback(
    run: Run, home: Path, kind: str
) -> None:
    fill(home)
    good = home.with_name("good")
    home.rename(good)
    for place in PLACES:
        for words in (*READERS, *WRITERS):
            shutil.copytree(good, home)
            put(home / place, KINDS[kind])
            run(*words)
            shutil.rmtree(home)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["owner", "pid", "started_s", "updated_s", "state", "reason", "generation", "solved", "seats",
                         "elsewhere", "environment"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4),
    )
)  # fmt: skip
def test_a_notice_is_whole_or_none(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("notice")
    whole = Notice(
        owner="host:1:2.3.4", pid=1, started_s=1.0, updated_s=1.0, state="waiting", reason="", generation=1, solved=0
    )
    write_notice(folder, whole)
    assert read_notice(folder) is not None
    said = json.loads((folder / "daemon.json").read_text()) | values
    (folder / "daemon.json").write_text(json.dumps(said))
    read = read_notice(folder)
    assert read is None or (isinstance(read["owner"], str) and isinstance(read["seats"], list))


def test_a_pause_that_ends_on_another_day_says_which(run: Run, home: Path) -> None:
    now_s = time.time()
    assert moment(now_s, now_s) == time.strftime("%H:%M", time.localtime(now_s))
    day = time.strftime("%Y-%m-%d", time.localtime(now_s + 7 * 86_400))
    assert f"until {day}" in run("pause", "--for", "7d")
    fill(home)
    assert f"PAUSED until {day}" in run("status")
    assert f"paused until {day}" in Rules().why_not(now_s, home)
    told = json.loads(run("pause", "--for", "1h", "--json"))
    assert told["until_s"] == pytest.approx(now_s + 3600, abs=60)
    assert json.loads(run("resume", "--json"))["was_paused"] is True
    assert json.loads(run("resume", "--json"))["was_paused"] is False
    for text in ("inf", "1e18", "nan", "-", ""):  # no moment: until somebody resumes
        (home / "paused").write_text(text)
        assert paused_until(home, now_s) == 0


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_json_has_the_same_keys_in_every_state(run: Run, home: Path, words: tuple[str, ...]) -> None:
    keys: dict[str, set[str]] = {}

    def ask(state: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(run(*words, "--json"))
        keys[state] = set(answer)
        return answer

    name = home / "tune.db"
    none = ask("no database")
    name.touch()
    ask("empty file")
    name.unlink()
    open_store(home).close()
    ask("nothing in it")
    fill(home)
    some = ask("some")
    with sqlite3.connect(name) as conn:
        conn.execute(f"PRAGMA user_version = {migrations.SCHEMA + 1}")
    conn.close()
    ask("newer schema")

    assert all(found_keys == keys["some"] for found_keys in keys.values()), keys
    assert (none["database"], some["database"]) == (None, str(name))


def test_a_dry_run_and_an_unknown_problem_write_nothing(run: Run, home: Path) -> None:
    fill(home)

    def rows() -> int:
        with sqlite3.connect(home / "tune.db") as conn:
            count: int = conn.execute("SELECT count(*) FROM problem").fetchone()[0]
        conn.close()
        return count

    before = rows()
    unknown = "fp32:77x77x77,threads=2"
    for words in (
        ("withdraw", unknown, "--dry-run"), ("pin", unknown, "--dry-run"), ("forget", unknown, "--dry-run"),
        ("withdraw", str(problem()), "--dry-run"), ("rollback", "--generation", "0", "--dry-run"),
        ("forget", unknown), ("withdraw", unknown), ("pin", unknown),
    ):  # fmt: skip
        run(*words)
        assert rows() == before, words
    assert len(json.loads(run("gains", "--json"))["rows"]) == 1


def test_explain_of_what_was_never_seen_ends_with_1(run: Run, home: Path) -> None:
    fill(home)
    run("explain", "8", "1024", "512", codes=(0,))
    assert "was never seen" in run("explain", "fp32:77x77x77,threads=2", codes=(1,))
    assert "was never seen" in run("explain", "77", "77", "77", codes=(1,))


def test_explain_says_with_how_many_threads_there_is_a_solution(run: Run, home: Path) -> None:
    fill(home)
    store = open_store(home)
    store.sightings.add("serve", NEW, [saw(problem(threads=4), 3)], now_s=time.time())
    store.close()
    said = " ".join(run("explain", str(problem(threads=4))).split())
    assert f"{problem(threads=4)} has a solution with 2 threads: one for 4 is another" in said
    assert "has a solution with" not in run("explain", str(problem()))
    assert "with 2 threads" in " ".join(run("explain", "fp32:8x1024x512,threads=7", codes=(1,)).split())


def test_coverage_says_with_how_many_threads_the_same_shapes_are_tuned(run: Run, home: Path) -> None:
    fill(home)
    assert "OMP_NUM_THREADS" not in run("coverage")
    store = open_store(home)
    store.sightings.add("serve", NEW, [saw(problem(threads=4), 3), saw(problem(77, threads=4), 3)], now_s=time.time())
    store.close()
    for by in ("family", "problem", "layer"):
        said = " ".join(run("coverage", "--by", by).split())
        assert "serve with 4 threads: stock torch runs for 1 problem whose shape is tuned at 2 threads" in said, said
        assert "gemmtuned tune --threads 4" in said
