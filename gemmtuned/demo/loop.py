"""The whole loop in a minute: two copies of one program, one of them hooked; tuning; the same two again.

Both run all the time and take turns, so that a change of the machine's speed meets both.  Nobody is restarted between
"before" and "after": the hooked one takes the result up while it runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.settings import child_env
from gemmtuned.reports.render import several

ROUNDS: Final = 9
LEAST_ROUNDS: Final = 3  # as many at any rate,
ROUNDS_FOR_ONE_SLOWER: Final = 8  # one of which may be slower, see Result.is_clear
ROUND_S: Final = 0.5  # seconds of decoding, each program in each round
ROUNDS_S: Final = 12.0  # no round begins after this: beside others, all take longer
TUNE_S: Final = 30  # seconds for the daemon; what is not tuned by then stays as it was
SAY_S: Final = 5.0  # between two lines while it tunes
LOOK_S: Final = 0.1


@dataclass(slots=True)
class Result:
    """What was seen: tokens/s of both programs before and after, the largest difference of their outputs.

    verdicts: how many shapes have one; where none has, nothing is measured after.
    """

    home: Path
    device: str
    before: dict[str, list[float]] = field(default_factory=dict)
    after: dict[str, list[float]] = field(default_factory=dict)
    difference: float = 0.0
    verdicts: int = 0
    took_s: float = 0.0

    def gain(self, figures: dict[str, list[float]]) -> tuple[float, float, float]:
        """(median, lowest, highest) over the rounds of hooked by plain tokens/s."""
        ratios = self._ratios(figures)
        return statistics.median(ratios), ratios[0], ratios[-1]

    def slower(self) -> int:
        """The number of rounds after tuning in which the hooked program was no faster."""
        return sum(ratio <= 1.0 for ratio in self._ratios(self.after))

    def is_clear(self) -> bool:
        """Whether the gain is no matter of chance: of eight rounds or more one may be slower, of fewer none.

        Two programs of one speed would give that in one run of fifty with nine rounds (of 512 ways ten).
        """
        return self.slower() <= (len(self.after["hooked"]) >= ROUNDS_FOR_ONE_SLOWER)

    @staticmethod
    def _ratios(figures: dict[str, list[float]]) -> list[float]:
        return sorted(h / p for h, p in zip(figures["hooked"], figures["plain"], strict=True))


class _Program:
    """One running gemmtuned.demo.program."""

    def __init__(self, name: str, home: Path) -> None:
        switch = "1" if name == "hooked" else "0"
        env = child_env(
            GEMMTUNED=switch,
            GEMMTUNED_DISPATCH=switch,
            GEMMTUNED_HOME=str(home),
            GEMMTUNED_RUN="demo",
            TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        )
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the program
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gemmtuned.demo.program"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises GemmtunedError with what the program wrote last when it died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = " | ".join(self._errors.read().strip().splitlines()[-2:])
            raise GemmtunedError(f"the demo's {self.name} program ended with {self._process.returncode}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def decode(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def run(home: Path, *, say: Callable[[str], None], rounds: int = ROUNDS, tune_s: float = TUNE_S) -> Result:
    """Run the loop with its database and tables in `home`. Raises GemmtunedError when a part of it fails."""
    began_s = time.monotonic()
    programs: list[_Program] = []
    try:
        say("Starting two copies of a small decoder ...")
        programs += [_Program(name, home) for name in ("plain", "hooked")]
        ready = [program.answer() for program in programs]
        result = Result(home, device=f"{ready[0]['device']}, {ready[0]['threads']} threads")
        steps = _steps(programs[0])
        say(f"They run on {result.device}, and take turns; one has GEMMTUNED=1.")
        say(f"Measuring both, {rounds} rounds at most ...")
        result.before, _ = _rounds(programs, steps, rounds)
        say(f"Before tuning: {_spell(result, result.before)}")
        time.sleep(1.5)  # one flush: what was called is in the database
        say(f"Tuning what the hooked one called, at most {tune_s:g} s ...")
        _tune(home, tune_s, say)
        result.verdicts = _published(home)
        if result.verdicts:  # without one both still run what they ran before
            say(f"{several(result.verdicts, 'shape has', 'shapes have')} a verdict. Measuring the same two again ...")
            time.sleep(1.0)
            _rounds(programs, steps, 1)
            result.after, result.difference = _rounds(programs, steps, rounds)
            say(f"After tuning, the same two processes: {_spell(result, result.after)}")
    finally:
        for program in programs:
            program.stop()
    result.took_s = time.monotonic() - began_s
    return result


def _steps(program: _Program) -> int:
    """How many steps take ROUND_S."""
    program.decode(2)
    return _fitting(4, float(program.decode(4)["seconds"]))


def _fitting(steps: int, took_s: float) -> int:
    """How many steps take ROUND_S, when these took that long."""
    return max(2, round(steps * ROUND_S / took_s))


def _rounds(programs: Sequence[_Program], steps: int, count: int) -> tuple[dict[str, list[float]], float]:
    """Tokens/s of every program in each round, taking turns; and the largest relative difference of their outputs.

    Beside others the rounds become shorter and fewer, so that a minute stays one.
    """
    speeds: dict[str, list[float]] = {program.name: [] for program in programs}
    difference, began_s = 0.0, time.monotonic()
    for number in range(count):
        if number >= LEAST_ROUNDS and time.monotonic() - began_s > ROUNDS_S:
            break
        sums, took_s = [], 0.0
        for program in programs if number % 2 == 0 else reversed(programs):
            answer = program.decode(steps)
            speeds[program.name].append(answer["tokens"] / answer["seconds"])
            sums.append(answer["sum"])
            took_s = max(took_s, answer["seconds"])
        if took_s > 2 * ROUND_S:
            steps = _fitting(steps, took_s)
        difference = max(difference, abs(sums[0] - sums[1]) / max(abs(sums[0]), 1e-9))
    return speeds, difference


def _tune(home: Path, tune_s: float, say: Callable[[str], None]) -> None:
    """`gemmtuned tune` for what was called, until it is done or its time is over: what is finished is published."""
    command = [sys.executable, "-m", "gemmtuned", "tune"]
    env = child_env(GEMMTUNED_HOME=str(home), GEMMTUNED="0", GEMMTUNED_DISPATCH="0")
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        code = _wait(process, home, tune_s, say)
        if code not in (0, 75):  # 75: the machine was busy, some problems were put off
            out.seek(0)
            raise GemmtunedError(f"gemmtuned tune ended with {code}: {' | '.join(out.read().splitlines()[-2:])}")


def _wait(process: subprocess.Popen[bytes], home: Path, most_s: float, say: Callable[[str], None]) -> int:
    """Wait for the process, and return its exit code. After most_s seconds it is ended, which gives 0.

    say: is called every SAY_S seconds with how far it is.
    """
    began_s = said_s = time.monotonic()
    while (code := process.poll()) is None:
        now_s = time.monotonic()
        if now_s - said_s >= SAY_S:
            said_s = now_s
            say(f"  {now_s - began_s:.0f} s: {several(_published(home), 'shape has', 'shapes have')} a verdict")
        if now_s - began_s >= most_s:
            process.terminate()
            process.wait()
            return 0
        time.sleep(LOOK_S)
    return code


def _published(home: Path) -> int:
    """How many rows the published tables hold."""
    manifest = read_manifest(home / "configs")
    return sum(file.rows for file in manifest.files) if manifest else 0


def _spell(result: Result, figures: dict[str, list[float]]) -> str:
    median, low, high = result.gain(figures)
    plain, hooked = (statistics.median(figures[name]) for name in ("plain", "hooked"))
    return f"plain {plain:.0f} tokens/s, hooked {hooked:.0f}; round by round {median:.2f}x [{low:.2f}, {high:.2f}]"
