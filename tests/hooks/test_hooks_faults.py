"""A disk that fails a program's hook once, at every place in turn: its results, its lines and its counts.

The places are the failpoints that a flush, the loader and probation pass: opens, writes, renames, commits.
"""

from __future__ import annotations

import re

import pytest
from hooked import LINEAR, Home, publish, published

PLACES = {
    "library.open", "load.open", "lock.release", "probation.rename", "probation.write", "store.begin", "store.commit",
    "store.committed", "store.open",
}  # fmt: skip
PROGRAM = """
    import json, os, struct, sys, time, torch, gemmtuned
    from pathlib import Path
    from gemmtuned._testing import faults
    from gemmtuned.configs.processes import pid_namespace
    from gemmtuned.hooks import probation

    x, w = torch.ones(4, 16), torch.ones(8, 16)

    def evidence():
        # a process of another run has died in a routed call: there is something to be taken home
        folder = probation.pages_of(Path(os.environ["GEMMTUNED_HOME"]) / "probation")
        folder.mkdir(parents=True, exist_ok=True)
        facts = json.dumps({"run": "another", "namespace": pid_namespace(), "start": "0"})
        (folder / f"1-{os.getpid()}-1-{time.time_ns()}").write_bytes(struct.pack("iIII", 1, 0, 0, 0) + facts.encode())

    def life(rule):
        gemmtuned.disable()
        os.write(2, f"== {rule}\\n".encode())
        evidence()
        with faults.armed(rule) as passed:
            gemmtuned.enable()
            gemmtuned.ready(10)
            said = []
            for _ in range(4):
                said.append(torch.nn.functional.linear(x, w).sum().item())
                time.sleep(0.06)
            gemmtuned.disable()
            return said, gemmtuned.generation(), list(passed)

    _, _, places = life("")
    wrong = []
    rules = [f"*={number}" for number in range(1, len(places) + 1, int(sys.argv[1]))]
    for rule in [f"{place}=1" for place in sorted(set(places))] + rules:
        for error in sys.argv[2:]:
            said, _, _ = life(f"{rule}:{error}")
            if said != [512.0] * 4:
                wrong.append([rule, said])
    print(json.dumps([sorted(set(places)), wrong]))
    """


def fails_once(home: Home, every: int, *errors: str) -> None:
    """Each place fails at its first passing, and every `every`-th passing of all."""
    home.path.mkdir(exist_ok=True)
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(PROGRAM, str(every), *errors, timeout_s=600, GEMMTUNED_FLUSH_S="0.03", GEMMTUNED_QUIET="1")
    places, wrong = done.said
    lives = [life.splitlines() for life in done.err.split("== ")[1:]]

    assert wrong == []
    assert set(places) >= PLACES
    assert [life for life in lives if len(life) > 2] == [], done.err
    assert len(lives) > len(PLACES) * len(errors)
    uncounted = 4 * len(re.findall("nothing is counted or routed", done.err))
    lost = sum(int(calls) for calls in re.findall(r"counts were lost calls=(\d+)", done.err))
    assert home.calls() == 4 * len(lives) - uncounted - lost, done.err
    assert not [path for path in (home.path / "probation").iterdir() if path.name.startswith(".")]


def test_a_fault_anywhere_changes_no_result_loses_no_count_in_silence_and_says_one_line_at_most(home: Home) -> None:
    fails_once(home, 3, "EIO")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_fault_at_every_place(home: Home) -> None:
    fails_once(home, 1, "EIO", "ENOSPC", "EACCES", "EMFILE")
