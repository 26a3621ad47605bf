"""On which devices a process takes solutions up, and that what newly comes into use there is on probation."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked import LINEAR, Home, published, solution

from gemmtuned.configs.packed import pack
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.hooks.hook import Hook
from gemmtuned.hooks.native import Row
from gemmtuned.hooks.native.build import build, library_path
from gemmtuned.hooks.probation import TRIAL_S
from gemmtuned.hooks.routes import Routes

GPU = Environment(Device("cuda-x-132", "cuda", "x", "sm_90", 132), {"torch_swap": "2.13"})
SOLUTION = solution(replace(LINEAR, threads=0), "torch_swap", GPU.device.key, "2.13")


class CudaLibrary:
    """Stands for the native hook of a torch with CUDA, which does not run here: it keeps the rows it is given."""

    has_cuda = True

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.page = (ctypes.c_uint32 * 4)()

    def watch(self, operators: Any) -> None:
        """Who registers over these is not of interest here."""

    def show_beats(self, *_: object) -> None:
        """Nobody looks at them here."""

    def take_freed(self) -> None:
        """Nobody stands over an operator here."""

    def load(self, rows: Iterator[Row], generation: int) -> tuple[int, str]:
        self.rows = list(rows)
        return 0, ""

    def begin_probation(self, *_: object) -> None:
        """The next call makes a page, and calls are going on."""

    def end_probation(self, *, keep: bool) -> None:
        """No more."""

    def probation_page(self, *, make: bool = False) -> int:
        return ctypes.addressof(self.page)

    def set_switches(self, switches: int) -> None:
        pass

    def overridden(self, *, anew: bool = False) -> dict[str, str]:
        return {}

    def stand_before(self, *_: object) -> bool:
        return False  # there is no engine

    def failures(self) -> list[tuple[int, str]]:
        return []


class Gpus:
    """torch.cuda as a process on a host of eight GPUs finds it; `mine` are those it has a context on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialised, self.mine = False, {3}
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialised)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in self.mine, raising=False)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2**20 if index in self.mine else 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.fixture
def hook(tmp_path: Path, gpus: Gpus) -> Hook:
    """A hook that stands in no call, over a library with CUDA."""
    home = tmp_path / "home"
    settings = Settings(capture=True, home=home, db=home / "tune.db", config_dir=home / "configs", cache=home / "cache")
    hook = Hook(settings)
    library: Any = CudaLibrary()
    hook.library.native, hook.library.routes = library, Routes(library, settings.config_dir)
    hook.tables.probation.pages = library
    hook.where.environments |= {f"cuda:{index}": GPU for index in range(8)}
    return hook


def on_probation(hook: Hook) -> list[int]:
    """Generations that this process is on probation with."""
    return [hook.tables.probation.generation] if hook.tables.probation.generation is not None else []


def served(hook: Hook) -> list[str]:
    library: Any = hook.native
    return [row.place for row in library.rows]


def test_a_process_takes_up_solutions_only_for_gpus_that_it_uses(hook: Hook, gpus: Gpus) -> None:
    assert hook.where.in_use() == ("cpu",)
    gpus.initialised = True
    assert hook.where.in_use() == ("cpu", "cuda:3")
    hook.tables.use(7, [SOLUTION])
    assert served(hook) == ["cuda:3"]

    gpus.mine.add(5)
    hook.tick()
    assert served(hook) == ["cuda:3", "cuda:5"]


def test_a_torch_that_cannot_tell_contexts_is_asked_for_its_memory(
    hook: Hook, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext")
    gpus.initialised, gpus.mine = True, {2, 6}

    assert hook.where.in_use() == ("cpu", "cuda:2", "cuda:6")


def test_a_table_is_on_probation_once_its_rows_serve_calls_and_again_for_each_gpu(hook: Hook, gpus: Gpus) -> None:
    hook.tables.use(7, [SOLUTION])
    assert on_probation(hook) == []  # no row of it serves this process yet

    for used in ({3}, {3, 5}):
        gpus.initialised, gpus.mine = True, used
        hook.tick()
        assert on_probation(hook) == [7]
        hook.tables.probation.turn(time.monotonic())
        hook.tables.probation.turn(time.monotonic() + TRIAL_S)
        assert on_probation(hook) == []

    hook.tick()
    hook.tables.use(7, [replace(SOLUTION)])
    assert on_probation(hook) == []  # nothing new
    hook.tables.use(7, [replace(SOLUTION), replace(SOLUTION, covers="fine")])
    assert on_probation(hook) == [7]


def test_rows_of_the_users_own_put_no_generation_on_probation(hook: Hook) -> None:
    own = published(LINEAR, "torch_swap")  # tried in a process of its own before
    hook.tables.user_tables.filed = {pack(own): Path("mine.csv")}
    hook.tables.verdicts.answer(own, "")
    hook.tables.use(7, [])

    assert served(hook) == ["cpu"]
    assert on_probation(hook) == []


def test_calls_on_a_device_that_we_do_not_know_end_no_drain(hook: Hook) -> None:
    settings = replace(hook.settings, dispatch=True, log_tuned=True)
    hook = Hook(settings)
    for place in ("xpu:0", "cpu"):
        hook.account.op_counts.add(LINEAR, place)

    assert sorted(sighting.place for sighting in hook.drain()) == ["cpu", "xpu:0"]


def test_a_table_is_on_probation_again_when_the_native_hook_takes_over(home: Home, tmp_path: Path) -> None:
    built = build(home.cache)
    library = library_path(tmp_path / "cache")
    assert library is not None
    library.parent.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    done = home.run(
        """
        import json, os, shutil, sys, time
        from hooked import LINEAR, publish, published, wait_for
        import gemmtuned
        from gemmtuned.hooks import activate

        hook = activate.current()
        publish(hook.settings.config_dir, [published(LINEAR, "torch_swap")], 1)
        wait_for(lambda: gemmtuned.generation() == 1)
        said = [gemmtuned.status()["path"], hook.tables.probation.generation]
        shutil.copyfile(sys.argv[1][:-3] + ".json", sys.argv[2][:-3] + ".json")
        shutil.copyfile(sys.argv[1], sys.argv[2] + ".part")
        os.rename(sys.argv[2] + ".part", sys.argv[2])
        hook.patches.look_at_s = 0.0
        hook.tick()
        said += [gemmtuned.status()["path"], hook.tables.probation.generation]
        print(json.dumps(said))
        """,
        str(built),
        str(library),
        PATH=str(tmp_path / "bin"),
        GEMMTUNED_CACHE=str(tmp_path / "cache"),
    )

    assert done.said == ["off", None, "native", 1]
    assert [line[:32] for line in done.ours] == ["gemmtuned: nothing is counted or"]
