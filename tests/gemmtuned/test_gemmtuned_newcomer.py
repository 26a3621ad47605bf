"""What somebody meets in the first ten minutes: figures nobody has measured, sizes nobody called, a busy machine."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import environment
from store_cases import HOUR, NEW, found, new_store, open_store, problem, saw
from typer.testing import CliRunner, Result

import gemmtuned
from gemmtuned.cli import build
from gemmtuned.commands.daemon import _metrics
from gemmtuned.configs.errors import GemmtunedError, SettingError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.daemon.service.only_one import OnlyDaemon
from gemmtuned.daemon.service.telling import SAY_AGAIN_S, WAITS_S, Telling
from gemmtuned.demo import loop
from gemmtuned.reports.comparison import ARMS, TOO_BUSY, TOO_FEW, report

UNTIMED, TIMED = problem(n=64), problem(n=96)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One problem twice as fast, one that was timed, one of which only the size is known."""
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    store = new_store(tmp_path)
    seen = [saw(problem(), 100, us=10.0), saw(TIMED, 50, us=4.0), saw(UNTIMED, 50)]
    store.sightings.add("serve", NEW, seen, now_s=time.time() - HOUR)
    store.sightings.add("train", NEW, [saw(UNTIMED, 10)], now_s=time.time() - HOUR)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=time.time() - 60)
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=time.time())
    store.close()
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(build(), list(words))


def test_explain_does_not_pass_a_guess_by_size_off_as_a_time(home: Path) -> None:
    guessed, timed = call("explain", str(UNTIMED)).stdout, call("explain", str(TIMED)).stdout
    assert "60 calls seen, about " in guessed and "(by its size alone, not timed yet)" in guessed
    assert "50 calls seen, 4.00 us each by torch's own kernel" in timed and "about" not in timed
    assert "by its size" not in call("explain", str(problem())).stdout


def test_layers_say_how_much_of_their_time_is_a_guess(home: Path) -> None:
    share = json.loads(call("coverage", "--json").stdout)["total"]["estimated_share"]
    layers = json.loads(call("coverage", "--by", "layer", "--json").stdout)
    assert 0 < share < 1 and layers["total"]["estimated_share"] == pytest.approx(share)
    assert f"estimated: {100 * share:.1f} % of the GEMM time, by size alone" in call("coverage", "--by", "layer").stdout
    assert "estimated" not in call("coverage", "--by", "layer", "--run", "nobody").stdout
    model = torch.nn.Sequential(torch.nn.Linear(512, 64))
    assert "estimated: 100.0 % of the GEMM time" in str(gemmtuned.layers(model))
    assert "estimated" not in str(gemmtuned.layers(torch.nn.Sequential(torch.nn.Linear(512, 96))))


def test_the_page_says_how_much_of_its_time_is_a_guess(home: Path) -> None:
    share = json.loads(call("coverage", "--json").stdout)["total"]["estimated_share"]
    assert call("report", "-o", str(home / "r.html")).exit_code == 0
    said = f"Estimated: {100 * share:.1f} % of the GEMM time, by size alone"
    assert said in (home / "r.html").read_text()


def test_a_second_daemon_is_told_of_the_first_and_not_of_its_port(home: Path) -> None:
    here = Settings.from_env()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=r"Address already in use\. Choose another"):
            _metrics(port, here)
        first = OnlyDaemon(here)
        assert _metrics(port, here) is None
        first.close()


def test_by_layer_shows_as_many_as_are_asked_for(home: Path) -> None:
    text = call("coverage", "--by", "layer", "--limit", "1").stdout
    assert text.count("fp32, 2 threads") == 1 and "2 more: --limit 0 shows all" in text
    assert len(json.loads(call("coverage", "--by", "layer", "--limit", "2", "--json").stdout)["rows"]) == 2


@pytest.mark.parametrize("command", ["retune", "pin", "forget", "withdraw"])
@pytest.mark.parametrize("what", [("9", "9", "7"), ("fp32:9x9x7,threads=2",)])
def test_what_was_never_seen_is_said_to_be_so(command: str, what: tuple[str, ...], home: Path) -> None:
    done = call(command, *what)
    assert done.exit_code == 1 and f"{' '.join(what)} was never seen here" in done.stdout
    known = call(command, str(problem()), "--dry-run").stdout
    assert "never seen" not in known


def test_status_names_the_home_as_the_readme_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"home: {home}" in call("status").stdout.splitlines()
    monkeypatch.setenv("GEMMTUNED_HOME", str(home / "empty"))
    assert str(home / "empty") in call("status").stdout
    assert json.loads(call("status", "--json").stdout)["home"] == str(home / "empty")


@pytest.mark.parametrize("words", [(), ("coverage",), ("db",), ("db", "check"), ("tune",), ("run",), ("explain",)])
def test_h_is_help(words: tuple[str, ...]) -> None:
    short, full = call(*words, "-h"), call(*words, "--help")
    assert short.exit_code == 0 and short.stdout == full.stdout and "-h, --help" in full.stdout


def test_of_a_run_it_is_said_whose_calls_the_figures_are_of(home: Path) -> None:
    said = "calls and times are those of all programs"
    assert said in call("untuned", "--run", "train").stdout and said not in call("untuned").stdout
    assert said in call("untuned", "--by", "layer", "--run", "train").stdout


def test_no_generation_can_be_gone_back_to_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    open_store(tmp_path).close()
    done = call("rollback", "--generation", "7")
    assert done.exit_code == 1 and done.stderr == "gemmtuned: generation 7: nothing is published yet\n"


def test_python_has_the_same_reports_as_the_command_line(home: Path) -> None:
    def lines(*words: str) -> list[list[str]]:
        return [line.split() for line in call(*words).stdout.splitlines()]

    for by in ("family", "run", "problem", "layer"):
        assert [line.split() for line in str(gemmtuned.coverage(by=by)).splitlines()] == lines("coverage", "--by", by)
    assert [line.split() for line in str(gemmtuned.gains(by="layer")).splitlines()] == lines("gains", "--by", "layer")
    assert {"wall_us", "gemm_share", "program_gain"} <= set(gemmtuned.coverage(by="run").frame().columns)
    assert [row["calls"] for row in gemmtuned.coverage(run="train")] == [10]
    assert list(gemmtuned.gains(run="train")) == [] and len(gemmtuned.gains(run="serve")) == 1
    model = torch.nn.Sequential(torch.nn.Linear(512, 64))
    assert [row["calls"] for row in gemmtuned.layers(model, run="train")] == [10]


def test_python_names_the_words_that_it_knows(home: Path) -> None:
    with pytest.raises(
        GemmtunedError, match=r"'layers' is not one of family, device, run, problem, layer. Did you mean"
    ):
        gemmtuned.coverage(by="layers")
    with pytest.raises(GemmtunedError, match="'layers' is not one of solution, layer"):
        gemmtuned.gains(by="layers")
    asked: list[Any] = [
        gemmtuned.coverage,
        gemmtuned.gains,
        lambda run: gemmtuned.layers(torch.nn.Linear(1, 1), run=run),
    ]
    for ask in asked:
        with pytest.raises(GemmtunedError, match="no program called 'nobody' was counted; there are: serve, train"):
            ask(run="nobody")


def test_python_refuses_what_it_cannot_answer_by_its_name(home: Path) -> None:
    model = torch.nn.Linear(512, 64)
    for since_s in ("7d", -5, 0, float("nan"), float("inf"), None):
        for ask in (gemmtuned.coverage, partial(gemmtuned.layers, model)):
            with pytest.raises(GemmtunedError, match=r"since_s: .* is not a number of seconds above 0"):
                ask(since_s=since_s)
    with pytest.raises(GemmtunedError, match="limit: -1 is not a number of rows"):
        gemmtuned.gains(limit=-1)
    with pytest.raises(GemmtunedError, match="layers are weighed by their time alone"):
        gemmtuned.coverage(by="layer", weight="flops")
    assert "--weight flops is not for --by layer" in call("coverage", "--by", "layer", "--weight", "flops").stderr
    with pytest.raises(GemmtunedError, match=r"Did you mean coverage\?"):
        gemmtuned.frame("Coverag")
    nothing: Any = "abc"
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        gemmtuned.layers(nothing)


def test_a_model_that_is_a_layer_has_a_name(home: Path) -> None:
    assert [row["modules"] for row in gemmtuned.layers(torch.nn.Linear(512, 64))] == [["Linear"]]
    assert gemmtuned.layers(torch.nn.Linear(3, 2)).unseen == ("Linear",)


def test_an_empty_answer_is_a_frame_with_columns(home: Path) -> None:
    frame = gemmtuned.gains(run="train").frame()
    assert len(frame) == 0 and {"problem", "speedup", "saved_us"} <= set(frame.columns)


def compared(others: float, rounds: int = 5, **more: Any) -> tuple[str, str]:
    """(verdict, notes) of a program that was slower in each round that it was on."""
    figures = {arm: [2.0 if arm == "on" else 1.0] * rounds for arm in ARMS}
    found = report(["x"], figures, unit="s", higher_is_better=False, others=[others] * rounds, **more)
    return found.tables[0].rows[2]["verdict"], "\n".join(found.notes)


def test_a_busy_machine_is_no_verdict_on_gemmtuned() -> None:
    verdict, notes = compared(0.8)
    assert verdict == TOO_BUSY and "makes it" not in notes and "Too busy to tell: median -50.0 %" in notes
    verdict, notes = compared(0.1)
    assert verdict == "worse" and "gemmtuned makes it worse" in notes
    assert compared(0.8, rounds=2)[0] == TOO_FEW


def test_compare_says_whether_anything_tuned_ran_at_all() -> None:
    assert "none of 303 calls ran a solution: they are runs of stock torch, too" in compared(0.0, hits=(0, 303))[1]
    assert "no GEMM of it was counted" in compared(0.0, hits=(0, 0))[1]
    assert 'in the runs "on" 25.0 % of 1 call ran' not in compared(0.0, hits=(1, 4))[1]
    assert 'in the runs "on" 25.0 % of 4 calls ran a solution' in compared(0.0, hits=(1, 4))[1]


def test_the_two_rates_of_the_demo_are_not_read_as_its_ratio() -> None:
    """Medians of 13 and 17 tokens/s, and yet 0.97: the ratio is of neighbours in time."""
    figures = {"plain": [13.0, 20.0, 10.0], "hooked": [17.0, 19.4, 9.0]}
    said = loop._spell(loop.Result(Path(), "cpu"), figures)
    assert said == "plain 13 tokens/s, hooked 17; round by round 0.97x [0.90, 1.31]"


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_reason_to_fail(closed: str, home: Path) -> None:
    command = f"{sys.executable} -m gemmtuned status {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment(home), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(call("db", "check", "--json").stdout)["ok"]


def test_the_log_does_not_end_with_a_pause_that_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemmtuned.daemon")
    upkeep: Any = SimpleNamespace(trouble="", generation=0, elsewhere=())
    telling = Telling(None, "me", now_s=0.0)
    now_s = WAITS_S

    def tell(reason: str, forbidden: str = "") -> list[str]:
        nonlocal now_s
        now_s += WAITS_S
        notice = SimpleNamespace(id="cpu", name="cpu", state="waiting", reason=reason, problem="")
        seat: Any = SimpleNamespace(notice=lambda: notice, in_use=False, environment=None)
        caplog.clear()
        telling.tell(now_s, [seat], upkeep, solved=0, forbidden=forbidden)
        return [record.getMessage() for record in caplog.records]

    assert len(tell("others use 90 % (a 1)")) == 1 and tell("others use 80 % (a 1)") == []
    assert "reason='paused'" in tell("paused", forbidden="paused")[0] and tell("paused", forbidden="paused") == []
    after = tell("others use 70 % (a 1)")
    assert after[0] == "goes on after='paused'" and "others use 70 %" in after[1]
    assert tell("others use 70 % (a 1)") == [] and now_s < SAY_AGAIN_S


def test_a_folder_of_our_name_beside_a_program_is_named_and_nothing_is_switched_on(tmp_path: Path) -> None:
    """As a clone is, with an editable installation: its folders were half of a package, and no table was taken up."""
    (tmp_path / "gemmtuned").symlink_to(Path(__file__).resolve().parents[2])
    program = tmp_path / "serve.py"
    program.write_text("from gemmtuned._autoload import autoload\nautoload()\nprint('served')\n")
    env = environment(tmp_path / "home", GEMMTUNED="1")
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr
    assert f"the folder {tmp_path}/gemmtuned beside the program hides the package gemmtuned" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "home").exists()
