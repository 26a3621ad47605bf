"""Stands in for a package that has no build for CPUs: everything of it can be imported, and nothing of it runs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar


class Nothing:
    """A class, a function, or a constant of the package."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{__name__} is a stand-in here: it has no functions")


class Module(types.ModuleType):
    """The package, or a module in it."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the package."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """As MetaPathFinder has it."""
        inside = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """As Loader has it."""
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """As Loader has it."""


if __name__ != "engine_nothing":
    sys.meta_path.insert(0, Finder())
    __getattr__ = Module(__name__).__getattr__
