"""The file of our modules' code: used where it agrees with the sources, and let alone where anything is in doubt."""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gemmtuned
from gemmtuned.configs import bundle

NAMES = ["gemmtuned.of_a_test", "gemmtuned.of_a_test.inside"]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of two modules in ours, which is all that the file has."""
    folder = tmp_path / "more" / "of_a_test"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from gemmtuned.of_a_test import inside\nsource = 1\n")
    (folder / "inside.py").write_text("source = 1\n")
    monkeypatch.setattr(gemmtuned, "__path__", [*gemmtuned.__path__, str(folder.parent)])
    monkeypatch.setattr(bundle, "MODULES", {"gemmtuned": "of_a_test", "gemmtuned.of_a_test": "inside"})
    yield folder
    for name in NAMES:
        sys.modules.pop(name, None)
    vars(gemmtuned).pop("of_a_test", None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache" / "native").mkdir(parents=True, mode=0o755)
    return tmp_path / "cache"


def written(cache: Path) -> Path:
    (file,) = (cache / "native").iterdir()
    return file


def with_other_code(file: Path, change: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple) -> None:
    """Have the code in the file set `source` to 2, so that it can be told from what Python reads of the source."""
    facts, entries = marshal.loads(file.read_bytes())
    for name, entry in entries.items():
        code = compile(Path(entry[0]).read_text().replace("= 1", "= 2"), entry[0], "exec")
        entries[name] = change((*entry[:-1], code))
    file.write_bytes(marshal.dumps((facts, entries)))


def imported(cache: Path | None) -> list[ModuleType]:
    importlib.invalidate_caches()
    before = [*sys.meta_path]
    with bundle.in_use(cache):
        modules = [importlib.import_module(name) for name in NAMES]
    assert sys.meta_path == before
    return modules


def test_modules_come_from_the_file_and_are_as_python_would_have_made_them(sources: Path, cache: Path) -> None:
    bundle.write(cache)
    with_other_code(written(cache))
    from_file = imported(cache)
    told = [facts(module) for module in from_file]
    assert [module.source for module in from_file] == [2, 2]
    assert importlib.reload(from_file[1]).source == 1

    for name in NAMES:
        del sys.modules[name]
    plain = imported(None)
    assert [module.source for module in plain] == [1, 1]
    assert [facts(module) for module in plain] == told


def facts(module: ModuleType) -> tuple[Any, ...]:
    spec = module.__spec__
    assert spec is not None and type(spec.loader) is SourceFileLoader is type(module.__loader__)
    where = spec.submodule_search_locations
    kept = [name for name in vars(module) if name not in ("__builtins__", "source")]
    return (
        module.__file__, module.__cached__, module.__name__, module.__package__, module.__doc__, spec.name, spec.origin,
        spec.cached, spec.parent, spec.has_location, where, spec.loader, module.__loader__, sorted(kept),
    )  # fmt: skip


@pytest.mark.parametrize("prefix", [None, "/elsewhere"])
def test_the_place_of_bytecode_is_named_as_python_names_it(
    sources: Path, cache: Path, prefix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.write(cache)
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    for module in imported(cache):
        assert module.__cached__ == importlib.util.cache_from_source(str(module.__file__))


def edited(sources: Path, _: Path) -> None:
    for file in (sources / "inside.py", sources / "__init__.py"):  # Python's own bytecode notes whole seconds alone
        file.write_text("source = 3  # newer\n")


def other_length(_: Path, file: Path) -> None:
    with_other_code(file, lambda entry: (*entry[:3], entry[3] + 1, *entry[4:]))


def cut_short(_: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def empty(_: Path, file: Path) -> None:
    file.write_bytes(b"")


def no_code(_: Path, file: Path) -> None:
    file.write_bytes(marshal.dumps("nothing"))


def of_another_python(_: Path, file: Path) -> None:
    file.write_bytes(marshal.dumps((("3.99", 0, "", ()), marshal.loads(file.read_bytes())[1])))


def others_may_write(_: Path, file: Path) -> None:
    file.chmod(0o664)


def others_may_write_beside_it(_: Path, file: Path) -> None:
    file.parent.chmod(0o777)


def a_link(_: Path, file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to(file.with_name("other"))


def a_folder(_: Path, file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_pipe(_: Path, file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "doubt",
    [
        edited, other_length, cut_short, empty, no_code, of_another_python, others_may_write,
        others_may_write_beside_it, a_link, a_folder, a_pipe,
    ],
)  # fmt: skip
def test_what_is_in_doubt_is_imported_from_its_source(
    sources: Path, cache: Path, doubt: Callable[[Path, Path], None]
) -> None:
    bundle.write(cache)
    with_other_code(written(cache))
    doubt(sources, written(cache))

    assert {module.source for module in imported(cache)} == {3 if doubt is edited else 1}


def test_a_program_without_the_file_or_without_a_cache_imports_as_ever(sources: Path, cache: Path) -> None:
    assert [module.source for module in imported(cache)] == [1, 1]


def test_the_file_is_written_anew_only_once_a_source_has_changed(sources: Path, cache: Path) -> None:
    bundle.write(cache)
    file = written(cache)
    first = file.stat().st_ino
    bundle.write(cache)
    assert file.stat().st_ino == first

    edited(sources, file)
    bundle.write(cache)
    assert file.stat().st_ino != first
    with_other_code(file)  # which has no "= 1" any more
    assert [module.source for module in imported(cache)] == [3, 3]


def test_a_file_that_others_may_write_is_written_anew(sources: Path, cache: Path) -> None:
    bundle.write(cache)
    others_may_write(sources, written(cache))
    bundle.write(cache)
    assert written(cache).stat().st_mode & 0o777 == 0o644
    with_other_code(written(cache))
    assert [module.source for module in imported(cache)] == [2, 2]


def test_modules_without_a_source_are_left_out(sources: Path, cache: Path) -> None:
    (sources / "inside.py").unlink()
    bundle.write(cache)
    assert list(marshal.loads(written(cache).read_bytes())[1]) == NAMES[:1]


def test_an_exception_inside_leaves_no_finder(sources: Path, cache: Path) -> None:
    (sources / "inside.py").write_text("raise KeyError('here')\n")
    bundle.write(cache)
    before = [*sys.meta_path]
    with pytest.raises(KeyError, match="here"), bundle.in_use(cache):
        importlib.import_module(NAMES[0])
    assert sys.meta_path == before


def test_the_code_in_the_file_is_without_docstrings_and_types_and_runs_as_ever(sources: Path, cache: Path) -> None:
    (sources / "inside.py").write_text(
        '"""Of the module."""\n'
        "from __future__ import annotations\n"
        "class Kind:\n"
        '    """Of a class."""\n'
        "    a: int = 1\n"
        "    def sum(self, b: int, *c: int, **d: float) -> float:\n"
        '        """Of a method."""\n'
        "        return self.a + b + sum(c) + sum(d.values())\n"
        "async def nothing(x: int) -> None:\n"
        '    """Of a function."""\n'
        "def fails():\n"
        "    raise KeyError(source)\n"
        "source = 1\n"
    )
    bundle.write(cache)
    inside = imported(cache)[1]

    assert [inside.__doc__, inside.Kind.__doc__, inside.Kind.sum.__doc__, inside.nothing.__doc__] == [
        "Of the module.", None, None, None,
    ]  # fmt: skip
    assert inside.Kind.__annotations__ == {"a": "int"}
    assert inside.Kind.sum.__annotations__ == inside.nothing.__annotations__ == {}
    assert inside.Kind().sum(2, 3, d=4.5) == 10.5
    with pytest.raises(KeyError) as info:
        inside.fails()
    assert info.traceback[-1].lineno == 11 and "raise KeyError(source)" in str(info.traceback[-1].statement)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_garbage_collector_is_as_it_was_afterwards(sources: Path, cache: Path, is_on: bool) -> None:
    bundle.write(cache)
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        imported(cache)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
