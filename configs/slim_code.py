"""A module's code without what running it does not need: docstrings and the types of arguments.

A program that starts with the hook makes objects of all the code in bundle.py's file, and frees them when it ends.  The
types of a class's attributes stay, since value classes are made of them, and so do lines, which tracebacks name.
"""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any


def compiled(source: bytes, path: str) -> CodeType:
    """The code of a module with this source, as `compile` gives it but for what is left out. Raises SyntaxError."""
    tree = ast.parse(source, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    code: CodeType = compile(tree, path, "exec", dont_inherit=True)
    return code


def _drop_docstring(body: list[Any]) -> None:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        body[0] = ast.copy_location(ast.Pass(), first)
