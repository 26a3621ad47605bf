"""Faults that are planted in the code, one at a time, and the tests of `make test` that must notice each.

    python tests/tools/mutations.py                 # all of them: caught or survived, then a table in Markdown
    python tests/tools/mutations.py lease publish   # those whose name holds one of these words
    python tests/tools/mutations.py --check         # only whether each still fits the code, in a second
    python tests/tools/mutations.py --tested        # `make test` has passed on this very tree: begin with the faults

Each is tried in a copy of the working tree, in which the tests that are named for it run as `make test` runs them.
Before all of them the same tests run on the copy as it is, since a test that fails anyway notices nothing.  The exit
code is 1 when a fault survives, and when one does not fit the code any more: then mutations_list.py is to be brought
up to date.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MARKED: Final = ("-m", "not long and not soak and not gpu")
FAILED, PASSED = 1, 0  # exit codes of pytest


@dataclass(frozen=True)
class Mutation:
    """A fault: `old` stands in `file` exactly once, and becomes `new`. tests: what notices it, as pytest names it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def misfit(self, root: Path) -> str:
        """Why it cannot be planted here; "" when it can."""
        text = (root / self.file).read_text() if (root / self.file).is_file() else None
        if text is None:
            return f"{self.file} is not there"
        if text.count(self.old) != 1:
            return f"{self.file} has its text {text.count(self.old)} times"
        missing = [test for test in self.tests if not _is_there(root / "tests", test)]
        return f"{missing[0]} is not there" if missing else ""


def _is_there(tests: Path, test: str) -> bool:
    """Whether the file of FILE::NAME[PARAMETERS] is there, and defines the test where one is named."""
    file, _, name = test.partition("::")
    if not (tests / file).is_file():
        return False
    return not name or f"def {name.partition('[')[0].rpartition('::')[2]}(" in (tests / file).read_text()


@dataclass(frozen=True)
class Result:
    """outcome: caught, survived, or why it was not tried. by: the test that failed first."""

    mutation: Mutation
    outcome: str
    by: str = ""
    seconds: float = 0.0


def copied(root: Path, folder: Path) -> Path:
    """A copy of the files that git knows or would add, with a folder `import` that holds its package alone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, to = root / name, folder / name
        if source.is_symlink() or source.is_file():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to, follow_symlinks=False)
    (folder / "import").mkdir()
    (folder / "import/gemmtuned").symlink_to(folder / "gemmtuned")
    return folder


def run(copy: Path, tests: Sequence[str], cache: Path | None) -> tuple[int, str]:
    """(pytest's exit code, the test that failed first) of these tests in the copy."""
    env = {**os.environ, "PYTHONPATH": str(copy / "import"), "PYTHONDONTWRITEBYTECODE": "1"}
    if cache is not None:  # the library of a fault in C++ is nobody else's
        env["GEMMTUNED_CACHE"] = str(cache)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *MARKED]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)], cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
    return done.returncode, first.partition(" ")[2].partition(" - ")[0].removeprefix("tests/")


def tried(mutation: Mutation, copy: Path) -> Result:
    """Plant it in the copy, run its tests, and take it out again."""
    wrong = mutation.misfit(copy)
    if wrong:
        return Result(mutation, wrong)
    began_s = time.monotonic()
    native = mutation.file.startswith("hooks/native/") and not mutation.file.endswith(".py")
    path = copy / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        with tempfile.TemporaryDirectory(prefix="mutated-") as cache:
            code, first = run(copy, mutation.tests, Path(cache) if native else None)
    finally:
        path.write_text(text)
    outcome = {FAILED: "caught", PASSED: "survived"}.get(code, f"pytest's exit code {code}: {first}")
    return Result(mutation, outcome, first, time.monotonic() - began_s)


def table(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    lines = ["| fault | where | outcome | noticed first by |", "|---|---|---|---|"]
    for one in results:
        by = f"`{one.by}`" if one.by else ""
        lines.append(f"| {one.mutation.name} | `{one.mutation.file}` | {one.outcome} | {by} |")
    return "\n".join(lines)


def main(
    words: Sequence[str], mutations: Sequence[Mutation], *, only_check: bool = False, tested: bool = False,
    root: Path = ROOT,
) -> int:  # fmt: skip
    """1 when anything survives or does not fit."""
    wanted = [m for m in mutations if not words or any(word in m.name for word in words)]
    misfits = [f"{m.name}: {wrong}" for m in wanted if (wrong := m.misfit(root))]
    if only_check or misfits:
        print("\n".join(misfits) or f"{len(wanted)} faults fit the code")
        return int(bool(misfits))
    results = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = copied(root, Path(folder))
        code, first = (PASSED, "") if tested else run(copy, sorted({test for m in wanted for test in m.tests}), None)
        if code != PASSED:
            print(f"the tests do not pass on the code as it is (pytest's exit code {code}): {first}")
            return 1
        for number, mutation in enumerate(wanted, 1):
            results.append(tried(mutation, copy))
            last = results[-1]
            print(
                f"{number}/{len(wanted)} {last.outcome:9} {last.seconds:4.0f} s  {mutation.name}: {last.by}", flush=True
            )
    print(f"\n{table(results)}")
    caught = sum(one.outcome == "caught" for one in results)
    print(f"\n{caught} of {len(results)} caught")
    return int(caught < len(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tested", action="store_true")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests/tools"))
    from mutations_list import MUTATIONS

    sys.exit(main(given.words, MUTATIONS, only_check=given.check, tested=given.tested))
