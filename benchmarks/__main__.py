"""Run a benchmark by its name, or list them: `python -m benchmarks [NAME [OPTION]...]`.

Each is a program of its own with --help; benchmarks/README.md says what each measures and what it needs.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def programs(folder: Path) -> dict[str, str]:
    """Name and first line of each file of the folder that is a program."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        if path.stem != "__main__" and 'if __name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    return found


def main(folder: Path, arguments: Sequence[str]) -> int:
    """Run the program that the first argument names. 2: there is none of that name; 0 without a name."""
    known = programs(folder)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"python -m {folder.name} NAME [OPTION]...\n")
        print("\n".join(f"{name:18} {line}" for name, line in known.items()))
        return 0
    name = arguments[0]
    if name not in known:
        print(f"{folder.name} has no {name!r}; `python -m {folder.name}` lists what there is", file=sys.stderr)
        return 2
    path = folder / f"{name}.py"
    sys.argv = [str(path), *arguments[1:]]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(path), run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(HERE, sys.argv[1:]))
