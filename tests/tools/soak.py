"""The long tests, one after another, each in a process of its own: `python tests/tools/soak.py` is `make soak`.

    python tests/tools/soak.py                    # all of them; what passed at this commit is not run again
    python tests/tools/soak.py test_daemon_gate   # those whose `file::test` holds one of these words
    python tests/tools/soak.py --list             # what there is, and what the last run of each gave
    python tests/tools/soak.py --again            # also what passed at this commit

Cut off (a signal, a reboot) it goes on where it was: what each test gave is written to .soak/results.json as soon as it
has ended, and what it printed to .soak/NAME.log.  A working tree with changes of its own resumes nothing.  The last
lines are a table by file, then each test that failed or was skipped, with the reason; the exit code is 1 when anything
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".soak"
MARKED: Final = ("-m", "soak and not gpu")
_COUNTED: Final = re.compile(r"(\d+) (passed|failed|error|skipped)")
_SKIPPED: Final = re.compile(r"^SKIPPED \[\d+\] [^:]+(?::\d+)?: (.*)$", re.MULTILINE)


def collected(root: Path) -> list[str]:
    """`tests/FILE.py::TEST` of all long tests, in pytest's order; one with parameters is one."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *MARKED]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        sys.exit(f"the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    names = (line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line)
    return list(dict.fromkeys(names))


def commit(root: Path) -> str:
    """What is checked out; "" where that is not all that there is."""
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=False
    ).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False).stdout
    return "" if changed.strip() else head.strip()


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """By test: outcome, seconds, when, commit, load. Empty when none can be read."""
    try:
        found = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(folder: Path, test: str, result: dict[str, Any]) -> None:
    """Write down what this test gave, beside all that others gave."""
    folder.mkdir(exist_ok=True)
    new = folder / "results.json.new"
    new.write_text(json.dumps({**results(folder), test: result}, indent=1) + "\n")
    new.replace(folder / "results.json")


def run(root: Path, folder: Path, test: str, at: str) -> dict[str, Any]:
    """Run one test; what it gave."""
    folder.mkdir(exist_ok=True)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-ra", "-p", "no:cacheprovider", *MARKED, test]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", test.removeprefix("tests/").replace(".py", ""))
    with (folder / f"{name}.log").open("wb") as log:
        done = subprocess.run(command, cwd=root, stdout=log, stderr=subprocess.STDOUT, check=False)
    text = (folder / f"{name}.log").read_text(errors="replace")
    counts = {what: int(number) for number, what in _COUNTED.findall((text.splitlines() or [""])[-1])}
    outcome = (
        "passed" if done.returncode == 0 and counts.get("passed") else "skipped" if not done.returncode else "FAILED"
    )
    return {
        "outcome": outcome, "counts": counts, "skipped": list(dict.fromkeys(_SKIPPED.findall(text))),
        "seconds": round(time.monotonic() - began_s), "commit": at,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"), "load": round(os.getloadavg()[0], 1),
        "log": f"{name}.log",
    }  # fmt: skip


def table(tests: Sequence[str], found: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each file, then the tests that failed and those that were skipped, wholly or in part."""
    lines = []
    for file in dict.fromkeys(test.partition("::")[0] for test in tests):
        of = [found.get(test) for test in tests if test.startswith(f"{file}::")]
        ran = [one for one in of if one is not None]
        outcomes = [one["outcome"] for one in ran]
        said = ", ".join(f"{outcomes.count(what)} {what}" for what in dict.fromkeys(outcomes)) or "not run"
        more = f", {len(of) - len(ran)} not run" if ran and len(ran) < len(of) else ""
        lines.append(f"{file.removeprefix('tests/'):36s}{sum(one['seconds'] for one in ran):7d} s  {said}{more}")
    for test in tests:
        lines += [f"SKIPPED {test.removeprefix('tests/')}  {why}" for why in (found.get(test) or {}).get("skipped", ())]
    lines += [f"FAILED  {test}  .soak/{found[test]['log']}" for test in tests if _failed(found.get(test))]
    return lines


def _failed(result: dict[str, Any] | None) -> bool:
    return result is not None and result["outcome"] == "FAILED"


def main(words: Sequence[str], *, again: bool, only_list: bool, root: Path = ROOT, folder: Path = FOLDER) -> int:
    """Run what is wanted; 1 when anything of it failed."""
    at = commit(root)
    tests = [test for test in collected(root) if not words or any(word in test for word in words)]
    found = {test: one for test, one in results(folder).items() if test in tests}
    for number, test in enumerate([] if only_list else tests, 1):
        before = found.get(test)
        if not again and at and before is not None and before["commit"] == at and before["outcome"] != "FAILED":
            continue
        print(f"{number}/{len(tests)} {test.removeprefix('tests/')}", end=" ", flush=True)
        found[test] = run(root, folder, test, at)
        keep(folder, test, found[test])
        print(f"{found[test]['outcome']} in {found[test]['seconds']} s", flush=True)
    print("\n".join(table(tests, found)))
    return int(any(_failed(one) for one in found.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.words, again=given.again, only_list=given.list))
