"""`gemmtuned demo` beside other programs: it stays a minute, and says that nothing was found where that is so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from gemmtuned.cli import COMMANDS, MEANT, build
from gemmtuned.commands.cpu_of_others import Others
from gemmtuned.demo import loop


class Program:
    """Answers as gemmtuned.demo.program does; one step takes step_s."""

    def __init__(self, name: str, step_s: float) -> None:
        self.name, self.step_s = name, step_s
        self.asked: list[int] = []

    def decode(self, steps: int) -> dict[str, Any]:
        self.asked.append(steps)
        return {"tokens": 8 * steps, "seconds": steps * self.step_s, "sum": 1.0}


def pair(step_s: float) -> list[Any]:
    return [Program("plain", step_s), Program("hooked", step_s)]


def test_rounds_end_in_time_and_become_shorter_where_others_slow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = pair(0.01)
    figures, _ = loop._rounds(quiet, 50, 9)
    assert [len(of) for of in figures.values()] == [9, 9] and set(quiet[0].asked) == {50}
    monkeypatch.setattr(loop, "ROUNDS_S", 0.0)
    crowded = pair(0.05)
    figures, _ = loop._rounds(crowded, 50, 9)
    assert crowded[0].asked == crowded[1].asked == [50, 10, 10] == [50, *[round(loop.ROUND_S / 0.05)] * 2]
    assert figures["plain"] == pytest.approx([160.0] * loop.LEAST_ROUNDS)


@pytest.mark.parametrize(("share", "why"), [(0.55, "when they rest"), (0.0, "This machine is slow, then")])
def test_a_demo_that_found_nothing_says_so_and_points_at_nothing(
    share: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def found_nothing(home: Path, **options: Any) -> loop.Result:
        folders.append(home)
        return loop.Result(home, "cpu", {"plain": [8.0] * 3, "hooked": [9.0] * 3})

    monkeypatch.setattr(loop, "run", found_nothing)
    monkeypatch.setattr("gemmtuned.commands.demo.build_before", lambda *args: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(Others, "share", lambda self: share)
    done = CliRunner().invoke(build(), ["demo"])
    assert done.exit_code == 75 and "load 1000000.0 on" in done.output
    said = " ".join(done.output.split())
    assert f"No shape had a verdict when the time was over: other programs used {2 * share:.1f} of 2 CPUs" in said
    assert why in said and "Look at what" not in said
    assert len(folders) == 1 and not folders[0].exists()


@pytest.mark.parametrize(
    ("rounds", "slower", "clear"),
    [(3, 0, True), (3, 1, False), (7, 1, False), (8, 1, True), (9, 1, True), (9, 2, False)],
)
def test_a_demo_ends_with_the_gain_and_where_to_look(
    rounds: int, slower: int, clear: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found_some(home: Path, **options: Any) -> loop.Result:
        figures = {"plain": [10.0] * rounds, "hooked": [9.0] * slower + [15.0] * (rounds - slower)}
        return loop.Result(home, "cpu", figures, figures, verdicts=3, took_s=58.0)

    monkeypatch.setattr(loop, "run", found_some)
    monkeypatch.setattr("gemmtuned.commands.demo.build_before", lambda *args: None)
    done = CliRunner().invoke(build(), ["demo", "--home", str(tmp_path / "new")])
    lines = done.stdout.splitlines()

    assert done.exit_code == 0
    assert ("1.50x in 58 s, in processes that were never restarted." in lines) == clear
    told = f"{slower} of {rounds} rounds went slower"
    assert any(line.startswith(f"{told}; other programs used ") for line in lines) == (clear and slower > 0)
    assert any(line.startswith(f"No clear gain here (1.50x, and {told})") for line in lines) == (not clear)
    assert f"    GEMMTUNED_HOME={tmp_path / 'new'} gemmtuned coverage" in lines, "whole, to be copied"


def test_what_we_and_our_children_use_is_not_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 14 s on two CPUs in 10 s of time, 1 s was ours and 5 s those of children that have ended: 8 of 20."""
    every = [SimpleNamespace(user=100.0, nice=5.0, system=20.0), SimpleNamespace(user=106.0, nice=10.0, system=23.0)]
    own = [
        SimpleNamespace(user=1.0, system=0.5, children_user=10.0, children_system=1.0),
        SimpleNamespace(user=1.5, system=1.0, children_user=14.0, children_system=2.0),
    ]
    now = [50.0, 60.0]
    monkeypatch.setattr("psutil.cpu_times", lambda: every.pop(0))
    monkeypatch.setattr(
        "gemmtuned.commands.cpu_of_others.os", SimpleNamespace(times=lambda: own.pop(0), cpu_count=lambda: 2)
    )
    monkeypatch.setattr("gemmtuned.commands.cpu_of_others.time", SimpleNamespace(monotonic=lambda: now.pop(0)))

    assert Others().share() == pytest.approx(0.4)


class Running(Program):
    """A program of the demo that runs nothing, at 1 ms a step."""

    def __init__(self, name: str, home: Path) -> None:
        super().__init__(name, 0.001)

    def answer(self) -> dict[str, Any]:
        return {"ready": True, "device": "cpu", "threads": 2}

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("verdicts", [0, 3])
def test_what_has_no_verdict_is_not_measured_again_and_what_is_measured_is_said(
    verdicts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_Program", Running)
    monkeypatch.setattr(loop, "_tune", lambda *of: None)
    monkeypatch.setattr(loop, "_published", lambda home: verdicts)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    said: list[str] = []

    result = loop.run(tmp_path, say=said.append)

    assert len(result.before["hooked"]) == loop.ROUNDS
    assert len(result.after.get("hooked", ())) == (loop.ROUNDS if verdicts else 0)
    again = [line for line in said if line == "3 shapes have a verdict. Measuring the same two again ..."]
    assert len(again) == bool(verdicts)
    assert said.index("Measuring both, 9 rounds at most ...") < next(
        at for at, line in enumerate(said) if line.startswith("Before tuning: plain")
    )


def test_names_that_are_no_commands_say_what_is_meant() -> None:
    assert not MEANT.keys() & COMMANDS.keys()
    for name, meant in MEANT.items():
        done = CliRunner().invoke(build(), [name, "--anything"])
        assert done.exit_code == 2 and meant in done.output.replace("\n", " ")
        said = meant.split()[1].rstrip(",")
        assert not meant.startswith("gemmtuned ") or said in (*COMMANDS, "--help", "--version")
