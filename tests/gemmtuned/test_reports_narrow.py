"""Tables on a terminal that they are too wide for: no name and no figure is cut, no value is left out."""

from __future__ import annotations

import fcntl
import io
import os
import random
import struct
import termios

import pytest
from rich.console import Console

from gemmtuned.commands.options import seconds
from gemmtuned.configs.human_units import duration, span
from gemmtuned.reports import narrow, render
from gemmtuned.reports.narrow import Grid
from gemmtuned.reports.render import Column, Report, Table, count, factor

COLUMNS = (
    Column("problem", "problem", right=False),
    Column("device", "device", right=False),
    Column("calls", "calls ever", count),
    Column("us", "time of a call", duration),
    Column("gain", "gain at least", factor),
    Column("share", "hits at the call", render.percent),
    Column("why", "why", right=False),
)
ROWS = [
    {
        "problem": f"batched:fp32:{m}x1024x65536+bias,layout=nn,threads=2",
        "device": "cpu-amd-epyc-990867c7",
        "calls": 12_345_678,
        "us": 12_345.0,
        "gain": 1.25,
        "share": 0.5,
        "why": "",
    }
    for m in (8, 16)
]


def drawn(columns: tuple[Column, ...], rows: list[dict[str, object]], wide: int, **more: object) -> list[str]:
    """The lines of a table on a terminal this wide."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=wide, color_system=None, highlight=False)
    render._draw(console, Table("rows", columns, rows, **more))  # type: ignore[arg-type]
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_name_of_a_problem_has_a_line_of_its_own_and_what_is_alike_is_said_once() -> None:
    lines = drawn(COLUMNS, ROWS, 80)

    assert lines[0] == "every row: device cpu-amd-epyc-990867c7"
    assert [line for line in lines if line.startswith("batched")] == [row["problem"] for row in ROWS]
    assert sum(line.split() == ["12,345,678", "12.3", "ms", "1.25x", "50.0", "%"] for line in lines) == 2
    assert "why" not in " ".join(lines)  # no row says one


def test_a_single_row_keeps_its_columns_where_they_fit_and_else_is_a_list() -> None:
    assert drawn(COLUMNS[1:6], ROWS[:1], 80)[-1].split()[0] == "cpu-amd-epyc-990867c7"

    lines = drawn(COLUMNS, ROWS[:1], 80)

    assert [line.split()[0] for line in lines] == ["problem", "device", "calls", "time", "gain", "hits"]
    assert lines[0].endswith(str(ROWS[0]["problem"]))


def test_prose_and_headings_take_several_lines_and_figures_none() -> None:
    why = "others use the CPU: our threads waited for it 47% of the time, so no time counts"
    lines = drawn(COLUMNS[2:], [{**ROWS[0], "why": why}, {**ROWS[1], "why": "-"}], 80)

    first = next(i for i, line in enumerate(lines) if "12,345,678" in line)
    rest = [lines[first].split("50.0 %")[1], *lines[first + 1 : -1]]
    assert " ".join(" ".join(rest).split()) == why
    assert lines[-1].split() == ["12,345,678", "12.3", "ms", "1.25x", "50.0", "%", "-"]


def test_what_stands_below_a_row_goes_with_its_last_column() -> None:
    columns = (Column("name", "check", right=False), Column("found", "found", right=False))
    rows: list[dict[str, object]] = [
        {"name": "hook", "found": "/home/somebody/" + "x" * 60, "fix": "gemmtuned doctor --build"},
        {"name": "x", "found": "y"},
    ]  # fmt: skip

    lines = drawn(columns, rows, 40, below=Column("fix", "to mend it"))

    assert [line for line in lines if "mend" in line] == ["       to mend it: gemmtuned doctor"]
    assert "--build" in lines[lines.index("       to mend it: gemmtuned doctor") + 1]


@pytest.mark.parametrize("seed", range(40))
def test_any_table_fits_and_keeps_its_names_and_figures(seed: int) -> None:
    dice = random.Random(seed)
    wide, columns, rows = dice.choice((60, 80, 100)), dice.randint(1, 14), dice.randint(1, 5)
    right = [False, *(dice.random() < 0.7 for _ in range(columns - 1))]
    forms = ("{}x", "{}.3 ms", "-", "", "put{} off", "others{} use{} the{} CPU{}", "fp32:{}x768x1024,threads=2")
    cells = [
        [f"name-{row}-" + "n" * dice.randint(1, 30)]
        + [dice.choice(forms).format(*[1000 + 20 * row + column] * 4) for column in range(1, columns)]
        for row in range(rows)
    ]
    heads = ["problem", *dice.choices(["on stock torch", "calls", "of all GEMM time", "why", "M"], k=columns - 1)]
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=wide, color_system=None, highlight=False)

    narrow.draw(console, Grid(heads, right, cells, [""] * rows), wide)

    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= wide
    for row in cells:
        assert any(row[0] in line for line in lines)
        for cell, is_figure in zip(row, right, strict=True):
            for whole in [cell] if is_figure else cell.split():  # none is another cell's, for its number
                assert whole in narrow.NONE or any(whole in line for line in lines)


def test_a_long_line_goes_on_between_two_words_and_a_path_stays_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=30, color_system=None, highlight=False)
    monkeypatch.setattr(render, "terminal", lambda: console)
    path = "/home/somebody/.local/state/gemmtuned/tune.db"

    render.show(Report("test", lines=[f"  the store is {path}, and it has all that was counted"]), as_json=False)

    assert capsys.readouterr().out.splitlines() == [
        "  the store is", f"  {path},", "  and it has all that was", "  counted"
    ]  # fmt: skip


@pytest.mark.parametrize("wide", [1, 2, 12])
def test_a_wide_letter_is_there_however_little_room_is_left(wide: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=wide, color_system=None, highlight=False)
    rows = [["漢字", "🙂", "a", "b"], ["字漢", "b🙂", "c", "d"]]

    narrow.draw(console, Grid(["run"] * 4, [False] * 4, rows, ["", ""]), wide)

    assert out.getvalue().count("漢") == out.getvalue().count("字") == out.getvalue().count("🙂") == 2


def test_a_complaint_goes_on_between_two_words_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    path = "/home/somebody/.local/state/gemmtuned/tune.db"
    message = f"{path}: another program has had it for 5 s, and nothing was written"
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        render.complain(message)
        stderr.flush()
        shown = os.read(ours, 4096).decode().split("\r\n")
    os.close(ours)
    assert " ".join(shown) == f"gemmtuned: {message} "
    assert shown[1] == f"{path}:" and all(len(line) <= 40 for line in shown if line != shown[1])
    monkeypatch.setattr("sys.stderr", to_a_file := io.StringIO())
    render.complain(message)
    assert to_a_file.getvalue() == f"gemmtuned: {message}\n"


def test_a_length_of_time_is_said_as_it_was_named() -> None:
    said = {"3": "3 s", "90": "90 s", "45m": "45 min", "90m": "90 min", "1h": "1 h", "24h": "24 h", "36h": "36 h"}
    said |= {"7d": "7 days", "365d": "365 days", "0.5": "0.5 s", "100000": "100000 s"}
    assert {text: span(seconds(text)) for text in said} == said
