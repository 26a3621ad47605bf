"""Where the CPU time of a start with the hook goes, step by step: off, on, and on with a home that is new.

    python -m benchmarks guest_start [--rounds 40] [--save]

One program (`guest`'s: it imports torch, makes one product and ends) starts in each arm in turns, in fresh processes.
It notes the CPU time of all its threads and its page faults when a step ends:

    python       Python itself, until the program begins
    torch        `import torch` up to where torch calls the hook; nothing of ours has run by then
    hook         the hook is switched on, or a stub looks whether it is to be
    rest         the rest of `import torch`; Python collects garbage there, and looks at our objects, too
    product      one product
    last_flush   what `atexit` calls: the last flush
    end          Python takes all modules apart, C++ its static objects, and Linux the process

"added" is the median, with its quartiles, of (on - off) of the same round.  A start as a whole differs by a tenth from
one time to the next, and what `torch` and `python` seem to add shows how much of that is chance: there is no difference
between the arms.  `guest` measures the whole, with more starts; its budget is 40 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import guest
import record

STEPS = ("python", "torch", "hook", "rest", "product", "last_flush", "end")
OURS = ("hook", "rest", "last_flush", "end")
NOTES = 9  # a descriptor of the program's, which nobody else closes
PROGRAM = f"""
import atexit, json, os, resource
notes = []
def ends(step):
    used = resource.getrusage(resource.RUSAGE_SELF)
    notes.append([step, used.ru_utime + used.ru_stime, used.ru_minflt])
def last():
    ends("last_flush")
    os.write({NOTES}, json.dumps(notes).encode())
atexit.register(last)  # the first one is called last
from gemmtuned import _autoload
autoload = _autoload.autoload
def noted():
    ends("torch")
    autoload()
    ends("hook")
_autoload.autoload = noted
ends("python")
import torch
ends("rest")
torch.mm(torch.ones(4, 16), torch.ones(16, 8))
ends("product")
"""


def start(env: dict[str, str]) -> dict[str, tuple[float, float]]:
    """(ms of CPU, page faults) of each step of one start."""
    reads, writes = os.pipe()
    moves = [(os.POSIX_SPAWN_DUP2, writes, NOTES), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(sys.executable, [sys.executable, "-P", "-c", PROGRAM], env, file_actions=moves)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        notes: list[tuple[str, float, int]] = json.loads(file.read())
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"the program ended with {status}")
    notes.append(("end", used.ru_utime + used.ru_stime, used.ru_minflt))
    before = [("", 0.0, 0), *notes]
    return {
        step: ((cpu_s - earlier_s) * 1e3, float(faults - earlier))
        for (_, earlier_s, earlier), (step, cpu_s, faults) in zip(before, notes, strict=False)
    }


@contextmanager
def new_home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gemmtuned-guest-") as home:
        (Path(home) / "configs").mkdir()
        yield home


def measure(rounds: int, home: str) -> dict[str, list[dict[str, tuple[float, float]]]]:
    """The starts of each arm, one of each in a round."""
    off, on = guest.arms(Path(home)).values()
    for env in (off, on, on):  # warm: files are in memory, the home has been used
        start(env)
    found: dict[str, list[dict[str, tuple[float, float]]]] = {"off": [], "on": [], "first": []}
    for turn in range(rounds):
        for arm in (("off", "on", "first"), ("first", "off", "on"), ("on", "first", "off"))[turn % 3]:
            with new_home() as fresh:
                found[arm].append(start({"off": off, "on": on, "first": {**on, "GEMMTUNED_HOME": fresh}}[arm]))
    return found


def summary(found: dict[str, list[dict[str, tuple[float, float]]]], arm: str) -> dict[str, dict[str, Any]]:
    """By step, and for the whole start and for the steps in which anything of ours runs: what is added in this arm."""
    sums = {**{step: (step,) for step in STEPS}, "whole": STEPS, "ours": OURS}
    out: dict[str, dict[str, Any]] = {}
    for name, steps in sums.items():
        off, on = (
            [[sum(row[step][which] for step in steps) for row in found[each]] for which in (0, 1)]
            for each in ("off", arm)
        )
        out[name] = {
            "off_ms": round(statistics.median(off[0]), 2),
            "added_ms": guest.quartiles([b - a for a, b in zip(off[0], on[0], strict=True)]),
            "added_faults": statistics.median(on[1]) - statistics.median(off[1]),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/guest_start-<date>.json")
    args = parser.parse_args()
    guest.build_library()
    with new_home() as home:
        found = measure(args.rounds, home)
    result = {arm: summary(found, arm) for arm in ("on", "first")}
    for arm, steps in result.items():
        for name, step in steps.items():
            added = step["added_ms"]
            spread = f"[{added['q1']:+.1f}, {added['q3']:+.1f}]"
            faults = f"{step['added_faults']:+.0f} page faults"
            print(f"{arm:6} {name:11} off {step['off_ms']:8.1f} ms  added {added['median']:+7.1f} {spread:18} {faults}")
    if args.save:
        facts = record.facts()
        out = {"benchmark": "guest_start", "rounds": args.rounds, **result, "load_average": os.getloadavg()}
        print("saved", record.save(f"guest_start-{facts['date'][:10]}", out))


if __name__ == "__main__":
    main()
