"""Entry points by group, also where the metadata of an installed package is broken: Python then reads none at all."""

from __future__ import annotations

from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from pathlib import Path


def named_points(group: str) -> tuple[list[EntryPoint], dict[str, str]]:
    """(the entry points of this group, packages whose metadata cannot be read with what is wrong).

    Torch reads them too when it is imported, and fails there unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set.
    """
    try:
        return list(entry_points(group=group)), {}
    except Exception:  # one is broken: each is asked alone, which takes longer
        return _one_by_one(group)


def _one_by_one(group: str) -> tuple[list[EntryPoint], dict[str, str]]:
    found: dict[str, list[EntryPoint]] = {}
    broken: dict[str, str] = {}
    for package in distributions():
        try:
            name = _name_of(package) or _path_of(package)
            if name not in found:  # the first on the path is the one that is imported
                found[name] = [point for point in package.entry_points if point.group == group]
        except Exception as err:  # noqa: PERF203  whatever others have written there
            broken[_path_of(package)] = f"{type(err).__name__}: {err}"
    return [point for points in found.values() for point in points], broken


def package_of(point: EntryPoint) -> str:
    """The name of the package that names it; where its metadata cannot be read that of their folder, or ""."""
    return "" if point.dist is None else _name_of(point.dist)


def _name_of(package: Distribution) -> str:
    try:
        name = package.name
    except Exception:  # no metadata, or no text: who reads entry points need not care
        name = ""
    return name or Path(_path_of(package)).name.partition("-")[0]


def _path_of(package: Distribution) -> str:
    return str(getattr(package, "_path", None) or package)
