"""`gemmtuned top`: five states as they stand on the screen, the keys, and where Textual is not.

The screens lie in tests/data/top as text: what Textual's SVG export says, line by line, without fonts and colours.
After a change that is meant: `python tests/gemmtuned/test_gemmtuned_top.py` writes them anew; look at the difference.
"""

from __future__ import annotations

import asyncio
import copy
import html
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gemmtuned.cli import build
from gemmtuned.configs.errors import TryLater
from gemmtuned.top import actions, picture

DATA = Path(__file__).parents[1] / "data" / "top"
SIZE = (140, 32)
WIDTHS = (80, 110, 140)
SERVE = "bf16:1x6144x1024,threads=2"
TUNING = {
    "id": "cpu", "name": "cpu", "device": "cpu-amd", "state": "tuning", "reason": "", "others": 0.03, "clear_s": 12.0,
    "problem": "bf16:8x6144x1024,threads=2", "candidate": "onednn", "worker_pid": 99, "pids": [],
}  # fmt: skip
HELD = {
    "id": "GPU-1", "name": "cuda:0", "device": "cuda-h100", "state": "waiting", "others": 0.8, "clear_s": 0.0,
    "reason": "others use 80 % (process 8245 computes, 80%)", "problem": "", "candidate": "", "worker_pid": None,
    "pids": [8245],
}  # fmt: skip
SAID: dict[str, Any] = {
    "notice": {
        "owner": "h:1:b", "pid": 4711, "started_s": 1000.0, "updated_s": 8000.0, "state": "tuning", "reason": "",
        "generation": 17, "solved": 53, "environment": "e", "elsewhere": [], "seats": [TUNING, HELD],
    },
    "now_s": 8200.0,
    "used_today_s": 300.0,
    "programs": {
        "rows": [
            {"run": "serve", "host": "h", "pid": 8245, "rank": None, "path": "native", "generation": 17,
             "calls": 1234567, "calls_per_s": 41233.0, "state": "live", "last_seen": 0, "note": ""},
            {"run": "[red]train\x1b[31m", "host": "h", "pid": 8246, "rank": 1, "path": "native", "generation": 12,
             "calls": 10, "calls_per_s": None, "state": "silent", "last_seen": 0, "note": "an old table"},
        ],
        "more": 0,
        "calls_per_s": 41233.0,
    },
    "covered": {"faster": 81.0, "best": 12.0, "none": 7.0},
    "waiting": 12,
    "verdicts": [
        {"problem": SERVE, "covers": "exact", "device": "cpu-amd", "backend": "onednn", "config": "{}",
         "state": "published", "baseline_us": 20.0, "us": 12.0, "generation": 17, "published_us": 8_100_000_000},
        {"problem": "bf16:16x6144x1024,threads=2", "covers": "exact", "device": "cpu-amd", "backend": "torch",
         "config": "", "state": "default_best", "baseline_us": 20.0, "us": 20.0, "generation": 16,
         "published_us": 8_000_000_000},
    ],
    "users": {"cpu": [{"pid": 99, "name": "pytest", "cores": 0.06}],
              "GPU-1": [{"pid": 8245, "name": "VLLM::Worker", "cores": 0.1}]},
    "trouble": "",
}  # fmt: skip


def changed(state: str, reason: str = "", **more: Any) -> dict[str, Any]:
    said = copy.deepcopy(SAID)
    said["notice"] |= {"state": state, "reason": reason}
    seat = {**TUNING, "state": "waiting" if state != "ready" else "ready", "problem": "", "candidate": ""}
    said["notice"]["seats"] = [{**seat, "reason": reason or "nothing to tune"}]
    return said | more


def no_daemon() -> picture.Picture:
    raise TryLater("no daemon runs for this home. Start it: gemmtuned daemon")


EMPTY = {"rows": [], "more": 0, "calls_per_s": None}
STATES: dict[str, Callable[[], picture.Picture]] = {
    "tuning": lambda: picture.of(SAID),
    "held": lambda: picture.of(
        changed(
            "waiting",
            "others use 100 %",
            users={
                "cpu": [{"pid": 8245, "name": "pytest", "cores": 1.9}, {"pid": 77, "name": "cc1plus", "cores": 0.1}]
            },
        )
    ),
    "paused": lambda: picture.of(changed("paused", "paused until gemmtuned resume")),
    "nothing": lambda: picture.of(
        changed("ready", programs=EMPTY, covered=None, waiting=None, verdicts=[], users={}),
        switched_off="/home/me/.local/state/gemmtuned/disabled",
    ),
    "no-daemon": no_daemon,
}


def on_screen(
    look: Callable[[], picture.Picture],
    run: Callable[..., tuple[bool, str]] = lambda *words: (True, "done"),
    press: tuple[str, ...] = (),
    width: int = SIZE[0],
) -> str:
    """The SVG after these keys."""
    pytest.importorskip("textual")
    from gemmtuned.top.app import Top

    async def show() -> str:
        app = Top(look, run, tick_s=0.05)
        async with app.run_test(size=(width, SIZE[1]), notifications=True) as pilot:
            for _ in range(100):
                await pilot.pause(0.02)
                if app._picture is not None:
                    break
            for key in press:
                await pilot.press(key)
                await pilot.pause(0.2)
            await pilot.pause()
            return app.export_screenshot()

    return asyncio.run(show())


def lines(svg: str, width: int = SIZE[0]) -> str:
    """The text of the screen, as its lines."""
    found: dict[int, dict[float, str]] = {}
    for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        at = re.search(r"line-(\d+)", node.get("clip-path", ""))
        if at:
            found.setdefault(int(at[1]), {})[float(node.get("x", 0))] = html.unescape("".join(node.itertext()))
    shown = []
    for number in range(max(found) + 1):
        line = [" "] * width
        for x, text in found.get(number, {}).items():
            start = round(x / 12.2)
            line[start : start + len(text)] = text.replace("\xa0", " ")
        shown.append("".join(line).rstrip())
    return "\n".join(shown).rstrip() + "\n"


@pytest.mark.part(9)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", STATES)
def test_a_state_stands_on_the_screen_as_it_did(state: str, width: int) -> None:
    screen = lines(on_screen(STATES[state], width=width), width)

    assert screen == (DATA / f"{state}-{width}.txt").read_text()


@pytest.mark.parametrize("width", range(62, 141, 6))
@pytest.mark.parametrize("shares", [(0.81, 0.12, 0.07), (1.0, 0.0, 0.0), (0.34, 0.33, 0.33), (0.001, 0.0, 0.999)])
def test_the_shares_are_one_line(shares: tuple[float, float, float], width: int) -> None:
    head, bar, named = picture.share_line(shares, width)
    long = len(head) + sum(bar) + sum(len(f"  {a} {b}") for a, (b, _) in zip(named, picture.PARTS, strict=True))

    assert long <= width
    assert sum(bar) == 0 or all((cells > 0) == (share > 0) for cells, share in zip(bar, shares, strict=True))
    assert sum(bar) > 0 or width < 67
    assert "GEMM time" in head or width < 78


@pytest.mark.parametrize("width", WIDTHS)
def test_the_line_of_shares_follows_the_window(width: int) -> None:
    """A window that is made narrower, then wider again."""
    pytest.importorskip("textual")
    from gemmtuned.top.app import Top

    async def show() -> str:
        app = Top(STATES["tuning"], lambda *words: (True, ""), tick_s=0.05)
        async with app.run_test(size=(70, SIZE[1])) as pilot:
            await pilot.pause(0.2)
            await pilot.resize_terminal(width, SIZE[1])
            await pilot.pause(0.2)
            return app.export_screenshot()

    assert lines(asyncio.run(show()), width) == (DATA / f"tuning-{width}.txt").read_text()


def pressed(*keys: str, state: str = "tuning", done: bool = True, said: str = "done") -> tuple[list[Any], str]:
    """(the commands that these keys ran, the screen after them)."""
    ran: list[Any] = []

    def run(*words: str) -> tuple[bool, str]:
        ran.append(words)
        return done, said

    return ran, lines(on_screen(STATES[state], run, keys))


def test_p_pauses_and_resumes() -> None:
    assert pressed("p")[0] == [("pause",)]
    assert pressed("p", state="paused")[0] == [("resume",)]


def test_e_explains_the_problem_under_the_cursor() -> None:
    ran, screen = pressed("e", said="exact  M=1  this one runs")

    assert ran == [("explain", SERVE)]
    assert "this one runs" in screen


@pytest.mark.long
def test_w_asks_first() -> None:
    ran, screen = pressed("w")
    assert ran == [] and f"Withdraw {SERVE}?" in screen
    assert pressed("w", "n")[0] == []
    assert pressed("w", "y")[0] == [("withdraw", SERVE, "--reason", "by hand, in gemmtuned top")]


def test_a_command_that_fails_is_shown_and_ends_nothing() -> None:
    screen = pressed("p", done=False, said="gemmtuned: the home is closed to us [red]")[1]

    assert "the home is closed to us [red]" in screen and "Devices" in screen


def test_keys_without_a_problem_say_so() -> None:
    ran, screen = pressed("e", state="nothing")

    assert ran == [] and "Choose a line" in screen


@pytest.mark.long
def test_a_command_is_run_as_a_person_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))

    assert actions.run("pause") == (True, f"paused until gemmtuned resume: nothing is tuned for {tmp_path}")
    assert (tmp_path / "paused").exists()
    done, said = actions.run("explain", "no problem")
    assert not done and "gemmtuned" in said


def test_hostile_names_are_text() -> None:
    line = picture.of(SAID).programs[1]

    assert line.cells[0] == "[red]train  rank 1"


ADVISED = {  # what stands below the table of devices, by the reason that the daemon gives
    "others use 99 % (git 14619, a.py 8009)": "end or kill -STOP them, or gemmtuned tune; it starts once they rest",
    "process 8245, which holds the GPU, works": "nothing, if it serves; if it only polls the CPU, start it with "
    "GEMMTUNED=1: then its calls decide",
    "another gemmtuned daemon tunes": "",  # the daemons see to it
    "paused until gemmtuned resume": "",  # said already
}


@pytest.mark.parametrize("reason", ADVISED)
def test_advice_is_whole_below_the_devices(reason: str) -> None:
    seen = picture.of(changed("waiting", reason))
    assert seen.advice == ((f"cpu: {ADVISED[reason]}",) if ADVISED[reason] else ())


def test_a_reason_longer_than_its_cell_is_whole_below_it() -> None:
    reason = "2 starts of the worker failed, next start from 12:00: ImportError: " + "libtorch_cpu.so " * 9
    seen = picture.of(changed("waiting", reason))
    assert seen.devices[0].cells[2].endswith("...")
    assert seen.advice == (f"cpu: {reason}: gemmtuned doctor; the worker's own words are in the reason",)


@pytest.mark.parametrize(("number", "shown"), [(0, "-"), (1, "python (1000) 0.5 cores"), (9, " and 7 more")])
def test_who_uses_a_device_is_named_as_far_as_there_is_room(number: int, shown: str) -> None:
    users = [{"pid": 1000 + i, "name": "python", "cores": 0.5} for i in range(number)]
    cell = picture.of(changed("waiting", "others use 99 %", users={"cpu": users})).devices[0].cells[4]
    assert cell.endswith(shown) and len(cell) <= 70 and "..." not in cell


def test_on_a_narrow_screen_advice_goes_on_between_two_words() -> None:
    screen = lines(on_screen(STATES["held"], width=50), 50)
    assert "cpu: end or kill -STOP them, or gemmtuned tune;" in screen and " it starts once they rest" in screen


def test_shares_fill_the_bar_and_none_is_hidden() -> None:
    for shares in ((1.0, 0.0, 0.0), (0.999, 0.0005, 0.0005), (0.3, 0.3, 0.4), (0.0, 0.0, 1.0)):
        wide = picture.bar(shares)
        assert sum(wide) == picture.BAR
        assert all((cells > 0) == (share > 0) for cells, share in zip(wide, shares, strict=True))


def test_without_textual_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "textual" else find(name, *of))
    done = CliRunner().invoke(build(), ["top"])

    assert done.exit_code == 2
    assert done.stderr == (
        "gemmtuned: gemmtuned top needs Textual: pip install textual. Without it: gemmtuned status\n"
    )


def test_in_a_pipe_it_says_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textual")
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    done = CliRunner().invoke(build(), ["top"])
    assert done.exit_code == 2 and "gemmtuned top --json" in done.stderr
    done = CliRunner().invoke(build(), ["top", "--json"])
    assert done.exit_code == 75 and "Start it: gemmtuned daemon" in done.stderr


def test_textual_is_in_no_program_and_in_no_daemon() -> None:
    """Neither a serving program nor the daemon's parent imports what draws screens."""
    code = (
        "import sys, json, gemmtuned, gemmtuned.hooks.activate, gemmtuned.daemon.service.main, gemmtuned.cli; "
        "print(json.dumps(sorted({'textual', 'torch', 'pandas', 'jinja2'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    for name, look in STATES.items():
        for columns in WIDTHS:
            written = DATA / f"{name}-{columns}.txt"
            written.write_text(lines(on_screen(look, width=columns), columns))
            print(written.read_text())
