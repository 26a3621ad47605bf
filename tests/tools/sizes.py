"""How long files, classes and functions are: `python tests/tools/sizes.py` prints what is over a limit and why.

A file is readable in one sitting, a function fits a screen.  EXCEPTIONS: at most five, each with a reason.  It looks at
all that is installed, at what the docs run, and at tests, whose files may have a hundred lines more: they are read one
test at a time.  Benchmarks and the laboratory are read one program at a time.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("configs", "db", "kernels", "hooks", "daemon", "gemmtuned", "docs")
TESTS: Final = "tests"  # with a limit of its own for files, and the same for classes and functions
TEST_LINES: Final = 500
PYTHON_LINES, CPP_LINES, CLASS_LINES, FUNCTION_LINES = 400, 350, 250, 60
EXCEPTIONS: Final = {
    "configs/model_layers.py": "a table: one entry for each architecture of a model",
    "kernels/triton/fragments.py:fragments": "Triton compiles one function: cutting its loop changes its registers",
    "kernels/triton/selected.py:selected": "Triton compiles one function: cutting its loop changes its registers",
    "kernels/triton/tiles.py:tiles": "Triton compiles one function: cutting its loop changes its registers",
    "gemmtuned/commands/tune.py:tune": "its signature is the list of options, AITER's among them",
}


def too_long(root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """(FILE or FILE:NAME, lines) of what is over its limit, exceptions aside."""
    for folder in (*FOLDERS, TESTS):
        for path in sorted((root / folder).rglob("*")):
            if (root / "tests/data") in path.parents:  # what programs of earlier versions ran and left
                continue
            if any(part.is_symlink() for part in (path, *path.parents) if root in part.parents):
                continue
            name = str(path.relative_to(root))
            if path.suffix in (".h", ".cpp", ".cu", ".cuh") and ".gen." not in path.name:
                yield from _over(name, len(path.read_text().splitlines()), CPP_LINES)
            if path.suffix == ".py":
                text = path.read_text()
                yield from _over(name, len(text.splitlines()), TEST_LINES if folder == TESTS else PYTHON_LINES)
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
    if lines > limit and name not in EXCEPTIONS:
        yield name, lines


def main() -> int:
    """Print what is over a limit, then the exceptions. 1: something is too long."""
    found = dict(too_long())
    for name, lines in found.items():
        print(f"{name}: {lines} lines, too long")
    for name, reason in EXCEPTIONS.items():
        print(f"exception: {name}: {reason}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
