"""The screen of `gemmtuned top`, by Textual. Each half second the daemon's socket is asked, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.top import picture
from gemmtuned.top.picture import Line, Picture

TICK_S: Final = 0.5
_TONES: Final = {"good": "bold green", "still": "bold yellow", "bad": "bold red"}
_TITLES: Final = {
    "devices": ("Devices", picture.DEVICES),
    "programs": ("Programs", picture.PROGRAMS),
    "verdicts": ("Last verdicts", picture.VERDICTS),
}

Look = Callable[[], Picture]
Run = Callable[..., tuple[bool, str]]


class Top(App[None]):
    """look: the picture of now.  run: does what a key asks, see actions.run."""

    TITLE = "gemmtuned top"
    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = """
    #first, #second, #shares, #advice, #notes { height: auto; padding: 0 1; }
    .title { padding: 1 1 0 1; text-style: bold; height: auto; }
    DataTable { height: auto; max-height: 14; }
    Message { align: center middle; }
    #box { width: 90%; height: auto; max-height: 80%; border: round $primary; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause or resume"),
        Binding("e", "explain", "Explain"),
        Binding("w", "withdraw", "Withdraw"),
        Binding("tab", "app.focus_next", "Next table", show=False),
    ]

    def __init__(self, look: Look, run: Run, *, tick_s: float = TICK_S) -> None:
        super().__init__()
        self._look = look
        self._run_command = run
        self._tick_s = tick_s
        self._picture: Picture | None = None
        self._looking = False

    def compose(self) -> ComposeResult:
        yield Static("asking the daemon", id="first")
        yield Static("", id="second")
        yield Shares(id="shares")
        for name, (title, _) in _TITLES.items():
            yield Static(title, classes="title")
            yield DataTable(id=name, cursor_type="row", zebra_stripes=False)
            if name == "devices":
                yield Static("", id="advice")
        yield Static("", id="notes")
        yield Footer()

    async def on_mount(self) -> None:
        """Begin to ask."""
        for name, (_, heads) in _TITLES.items():
            table = self._table(name)
            for head in heads:
                table.add_column(head, key=head)
        self._table("verdicts").focus()
        self.set_interval(self._tick_s, self._tick)
        await self._tick()

    async def _tick(self) -> None:
        if self._looking:  # the daemon has not answered the last one yet
            return
        self._looking = True
        try:
            seen = await asyncio.to_thread(self._look)
        except GemmtunedError as err:
            seen = picture.without(str(err))
        finally:
            self._looking = False
        if seen != self._picture:
            self._show(seen)

    def _show(self, seen: Picture) -> None:
        before, self._picture = self._picture, seen
        if before is None or (before.first, before.tone) != (seen.first, seen.tone):
            self.query_one("#first", Static).update(Text(seen.first, style=_TONES[seen.tone]))
        if before is None or before.second != seen.second:
            self.query_one("#second", Static).update(Text(seen.second))
        if before is None or before.shares != seen.shares:
            self.query_one("#shares", Shares).show(seen.shares)
        for name in ("advice", "notes"):
            if before is None or getattr(before, name) != getattr(seen, name):
                static = self.query_one(f"#{name}", Static)
                static.display = bool(getattr(seen, name))
                static.update(Text("\n".join(getattr(seen, name))))
        for name in _TITLES:
            old: Sequence[Line] = getattr(before, name) if before else ()
            _fill(self._table(name), old, getattr(seen, name), _TITLES[name][1])

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    def _chosen(self) -> str:
        """The problem of the line that the cursor is on, "" for none."""
        table = self.focused
        if not isinstance(table, DataTable) or self._picture is None or table.id is None:
            return ""
        lines: Sequence[Line] = getattr(self._picture, table.id)
        return lines[table.cursor_row].problem if 0 <= table.cursor_row < len(lines) else ""

    def action_pause(self) -> None:
        """Pause the daemon, or go on."""
        paused = self._picture is not None and self._picture.paused
        self._do("resume" if paused else "pause")

    def action_explain(self) -> None:
        """Why the chosen problem runs what it runs."""
        problem = self._chosen()
        if not problem:
            self.notify("Choose a line that names a problem: Tab goes to the next table.")
            return
        self._do("explain", problem, whole=True)

    def action_withdraw(self) -> None:
        """Take the chosen problem's solution out of use, after a question."""
        problem = self._chosen()
        if not problem:
            self.notify("Choose a line that names a problem: Tab goes to the next table.")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._do("withdraw", problem, "--reason", "by hand, in gemmtuned top")

        question = f"Withdraw {problem}? Programs go back to stock torch for it.\n\ny: yes    n: no"
        self.push_screen(Message(question, asks=True), answered)

    def _do(self, *words: str, whole: bool = False) -> None:
        """Run a command beside the screen; whole: all that it printed is shown, else its last line."""

        async def run() -> None:
            done, said = await asyncio.to_thread(self._run_command, *words)
            if whole:
                self.push_screen(Message(said))
            else:
                last = said.splitlines()[-1] if said else f"gemmtuned {words[0]} said nothing"
                self.notify(last, severity="information" if done else "error", markup=False)

        self.run_worker(run(), exit_on_error=False)


class Message(ModalScreen[bool]):
    """A text over the screen. asks: a question, answered with y or n; else any of the keys ends it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "end(True)", "Yes"),
        Binding("n,escape,q,enter", "end(False)", "Close"),
    ]

    def __init__(self, text: str, *, asks: bool = False) -> None:
        super().__init__()
        self._text = text
        self._asks = asks

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box"):
            yield Static(Text(self._text))

    def action_end(self, yes: bool) -> None:
        """Close, with the answer."""
        self.dismiss(yes and self._asks)


class Shares(Static):
    """Shares of GEMM time, in one line of any width: see picture.share_line."""

    def __init__(self, *, id: str) -> None:
        super().__init__("", id=id)
        self._of: tuple[float, float, float] | None = None

    def show(self, shares: tuple[float, float, float] | None) -> None:
        """Show these from now on."""
        self._of = shares
        self._draw()

    def on_resize(self) -> None:
        """The bar takes what the words leave of the new width."""
        self._draw()

    def _draw(self) -> None:
        text = Text()
        if self._of is not None and self.content_size.width:
            head, bar, named = picture.share_line(self._of, self.content_size.width)
            text.append(head)
            for wide, (_, colour) in zip(bar, picture.PARTS, strict=True):
                text.append("█" * wide, colour)
            for share, (name, colour) in zip(named, picture.PARTS, strict=True):
                text.append("  ").append(share, f"bold {colour}").append(f" {name}")
        self.update(text)


def _fill(table: DataTable[Any], before: Sequence[Line], lines: Sequence[Line], heads: Sequence[str]) -> None:
    """Only cells that changed are written again: most ticks change two or three."""
    if [line.key for line in before] != [line.key for line in lines]:
        at = table.cursor_row
        table.clear()
        for line in lines:
            table.add_row(*(Text(cell) for cell in line.cells), key=line.key)
        table.move_cursor(row=min(at, max(len(lines) - 1, 0)))
        return
    for old, new in zip(before, lines, strict=True):
        for head, was, cell in zip(heads, old.cells, new.cells, strict=True):
            if was != cell:
                table.update_cell(new.key, head, Text(cell), update_width=True)
