"""Lines of source by folder at commits, blank ones aside: `python tests/tools/lines.py 71490d6 HEAD`, side by side.

Counted are Python, C++, CUDA and SQL of the folders at the top, as git has them; generated code and tests are not.  A
second table has the files in which the commits differ most, so that it shows what a folder has grown by.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("configs", "db", "kernels", "hooks", "daemon")
SUFFIXES: Final = (".py", ".h", ".cpp", ".cu", ".cuh", ".sql")
MOST: Final = 15  # files of the second table


def lines_of(commit: str, root: Path = ROOT) -> Counter[str]:
    """Lines that are not blank, of each file of a commit."""
    listed = subprocess.run(
        ["git", "ls-tree", "-rz", "--format=%(objectmode) %(objectname) %(path)", commit, *FOLDERS],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    entries = [entry.split(" ", 2) for entry in listed.split("\0") if entry]
    wanted = {
        path: name
        for mode, name, path in entries
        if mode != "120000" and PurePosixPath(path).suffix in SUFFIXES and ".gen." not in path
    }
    return Counter({path: _lines(name, root) for path, name in wanted.items()})


def _lines(name: str, root: Path) -> int:
    blob = subprocess.run(["git", "cat-file", "blob", name], cwd=root, check=True, capture_output=True).stdout
    return sum(bool(line.strip()) for line in blob.splitlines())


def by_folder(lines: Counter[str]) -> Counter[str]:
    """Lines of each folder at the top."""
    found: Counter[str] = Counter()
    for path, count in lines.items():
        found[path.partition("/")[0]] += count
    return found


def main(commits: Sequence[str]) -> int:
    """Print both tables in Markdown."""
    if not commits:
        sys.exit(__doc__)
    counts = [lines_of(commit) for commit in commits]
    folders = [by_folder(lines) for lines in counts]
    print(f"| lines, blank ones aside | {' | '.join(commits)} |\n|---|{'---:|' * len(commits)}")
    for folder in FOLDERS:
        print(f"| `{folder}/` | {' | '.join(str(one[folder]) for one in folders)} |")
    print(f"| sum | {' | '.join(str(one.total()) for one in folders)} |")
    if len(counts) > 1:
        first, last = counts[0], counts[-1]
        changed = sorted({*first, *last}, key=lambda path: -abs(last[path] - first[path]))[:MOST]
        print("\n| file | lines more |\n|---|---:|")
        for path in changed:
            print(f"| `{path}` | {last[path] - first[path]:+} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
