"""What each of our Triton kernels is made of, read from the files of this folder; Triton need not be here.

A kernel is a file with `KERNEL = TritonKernel(name=..., parameters=(Parameter(...), ...), ...)`.  Its hash covers the
functions of the file that Triton compiles, all functions and constants that these name, in this file or in those it
imports from, and what those are made of in turn.  It covers no other line and no docstring, so editing or adding one
kernel leaves the hash of every other as it was.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from gemmtuned.kernels.own_kernel import Parameter

_PACKAGE = "gemmtuned.kernels.triton."


@cache
def kernel_hashes() -> dict[str, str]:
    """The hash of each kernel's source, by the kernel's name."""
    files = _files()
    return {file.kernel: _hash(stem, files) for stem, file in files.items() if file.kernel}


def parameters() -> dict[str, tuple[Parameter, ...]]:
    """The parameters of each kernel's configs, by the kernel's name."""
    return {file.kernel: file.parameters() for file in _files().values() if file.kernel}


def code_of(text: str) -> str:
    """A whole file of Python without its comments and docstrings, for the stamps of what is launched by all of it."""
    return "\n".join(map(_written, _without_docstrings(ast.parse(text)).body))


def _files() -> dict[str, _File]:
    return {path.stem: _read(path, path.stat().st_mtime_ns) for path in sorted(Path(__file__).parent.glob("*.py"))}


@cache
def _read(path: Path, changed_ns: int) -> _File:
    """What is in a file that was changed last then: to read all of them takes 0.1 s."""
    return _File(path)


class _File:
    """The top level of one file: what it defines, what it imports, what Triton compiles, and the kernel it holds."""

    def __init__(self, path: Path) -> None:
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # local name -> (file of this folder, name there)
        self.compiled: list[str] = []
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                self.defined[node.name] = node
                if _is_compiled(node):
                    self.compiled.append(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        self.defined[ast.unparse(one)] = node
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = ((node.module or "")[len(_PACKAGE) :], alias.name)
        declared = getattr(self.defined.get("KERNEL"), "value", None)
        self._declared = {k.arg: k.value for k in declared.keywords} if isinstance(declared, ast.Call) else {}
        self.kernel: str = ast.literal_eval(self._declared["name"]) if self._declared else ""

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the kernel's configs."""
        declared: Any = self._declared["parameters"]  # a tuple of calls
        return tuple(
            Parameter(
                *map(ast.literal_eval, call.args),
                **{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords},
            )
            for call in declared.elts
        )


def _hash(stem: str, files: dict[str, _File]) -> str:
    todo = [(stem, name) for name in files[stem].compiled]
    seen = set(todo)
    digest = sha256()
    for file, name in todo:  # grows
        node = files[file].defined[name]
        digest.update(_written(_without_docstring(node)).encode())
        for used in _names(node):
            at = files[file].imported.get(used, (file, used))
            if at not in seen and at[0] in files and at[1] in files[at[0]].defined:
                seen.add(at)
                todo.append(at)
    return digest.hexdigest()[:12]


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _names(node: ast.stmt) -> Iterator[str]:
    """Names that a definition uses, in the order of its text."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id


def _without_docstring(node: ast.stmt) -> ast.stmt:
    if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
        return node
    body = node.body[1:] or [ast.Pass()]
    fields = {name: value for name, value in ast.iter_fields(node) if name != "body"}
    return ast.copy_location(ast.FunctionDef(**{**fields, "body": body}), node)


def _without_docstrings(node: Any) -> Any:
    """The same tree, in which neither it nor what it defines has a docstring."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(part, clean=False) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return node


def _written(node: Any) -> str:
    """A syntax tree as text that is the same under every Python: ast.unparse writes f-strings in different ways."""
    if isinstance(node, list):
        return f"[{' '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("kind", "type_comment"))
    kept = (f"{name}={_written(value)}" for name, value in fields if value not in (None, []))  # later ones have more
    return f"{type(node).__name__}({' '.join(kept)})"
