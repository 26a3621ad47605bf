"""How long files, classes and functions are: `python tests/sizes.py` prints what is over a limit and why.

A file is readable in one sitting, a function fits a screen.  What was too long when this check came stands in TODAY
with its length: it may shrink and never grow; nothing may join it.  EXCEPTIONS stay: at most five, each with a reason.
"""

from __future__ import annotations

import ast
import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("configs", "db", "kernels", "hooks", "daemon", "gemmtuned")
PYTHON_LINES, CPP_LINES, CLASS_LINES, FUNCTION_LINES = 400, 350, 250, 60
EXCEPTIONS: Final = {
    "configs/model_layers.py": "a table: one entry for each architecture of a model",
    "kernels/triton/*.py:*": "Triton compiles one function: cutting a kernel's loop changes its registers",
    "gemmtuned/commands/tune.py:tune": "its signature is the list of options, AITER's among them",
}
TODAY: Final[dict[str, int]] = {}


def too_long(root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """(FILE or FILE:NAME, lines) of what is over its limit, exceptions aside."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if any(part.is_symlink() for part in (path, *path.parents) if root in part.parents):
                continue
            name = str(path.relative_to(root))
            if path.suffix in (".h", ".cpp", ".cu", ".cuh") and ".gen." not in path.name:
                yield from _over(name, len(path.read_text().splitlines()), CPP_LINES)
            if path.suffix == ".py":
                text = path.read_text()
                yield from _over(name, len(text.splitlines()), PYTHON_LINES)
                yield from _inside(ast.parse(text), f"{name}:")


def _inside(tree: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield from _over(
                f"{prefix}{node.name}", lines, CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            )
            yield from _inside(node, f"{prefix}{node.name}.")
        else:
            yield from _inside(node, prefix)


def _over(name: str, lines: int, limit: int) -> Iterator[tuple[str, int]]:
    if lines > limit and not any(fnmatch.fnmatch(name, pattern) for pattern in EXCEPTIONS):
        yield name, lines


def main() -> int:
    """Print what is over a limit, then the exceptions. 1: something joined it or grew."""
    found = dict(too_long())
    bad = {name: lines for name, lines in found.items() if lines > TODAY.get(name, 0)}
    for name, lines in found.items():
        print(
            f"{name}: {lines} lines" + (f", too long: at most {TODAY[name]}" if name in TODAY and name in bad else "")
        )
    for name in TODAY.keys() - found.keys():
        print(f"{name}: no longer too long, take it out of TODAY")
    for name, reason in EXCEPTIONS.items():
        print(f"exception: {name}: {reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
