"""Which files of ours a program that is not ours imports: each is CPU time at its start, and memory for its life."""

from __future__ import annotations

import marshal
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hooked import LINEAR, Home, publish, published

from gemmtuned.configs import bundle
from gemmtuned.configs.solution import Device, cpu_device
from gemmtuned.hooks.dispatch import BY_OPS, NATIVE_CODES
from gemmtuned.hooks.native.build import build
from gemmtuned.hooks.where import Here
from gemmtuned.kernels import backends, stamps
from gemmtuned.kernels.backends.torch_op import OperatorBackend

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
MI300 = Device("rocm-amd-mi300x-304", "rocm", "AMD MI300X", "gfx942", 304)
COUNTING = {"gemmtuned.kernels", "gemmtuned.kernels.device", "gemmtuned.kernels.stamps"}  # of kernels/, all there is
OF_RECORDS = {  # what a table's rows take in addition
    "gemmtuned.configs.launch", "gemmtuned.configs.launch_v1", "gemmtuned.configs.launch_values",
    "gemmtuned.hooks.native.launches", "gemmtuned.hooks.routes",
    "gemmtuned.kernels.cublaslt", "gemmtuned.configs.operator_arguments",
}  # fmt: skip
MOST = 88  # files in all, of which the store has 12: what errors mean is had before a filter may forbid to read it
BEFORE = {  # the file of the others' code can be read; but for the last, what a program has that is switched off
    "gemmtuned", "gemmtuned._autoload", "gemmtuned.configs", "gemmtuned.configs.errors", "gemmtuned.configs.numbers",
    "gemmtuned.configs.settings", "gemmtuned.configs.value_class", "gemmtuned.configs.bundle",
}  # fmt: skip
MOST_OF_A_TABLE = 16  # further files for one row, those of records among them
PROGRAM = """
    import json, sys, weakref
    def told():
        ours = {name: module for name, module in sys.modules.items() if name.startswith("gemmtuned")}
        kinds = {kind for module in ours.values() for kind in vars(module).values() if isinstance(kind, type)}
        frozen = sorted(kind.__qualname__ for kind in kinds if kind.__module__ in ours
                        and getattr(getattr(kind, "__dataclass_params__", None), "frozen", False))
        print(json.dumps({"modules": sorted(ours), "frozen": frozen}))
    weakref.finalize(sys, told)  # after all exit functions that are registered from here on, and the hook's
    import torch, gemmtuned
    if len(sys.argv) > 1:
        assert gemmtuned.ready(30) and gemmtuned.status()["rows"] == 1
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
"""


def test_a_program_that_counts_imports_no_backend_and_no_launch_record(home: Home) -> None:
    """At its very end: the last flush has imported what it needs.  Frozen dataclasses are value_classes (see there)."""
    told = home.bare().run(PROGRAM).said
    modules = {*told["modules"]}

    assert home.calls() == 1
    assert {m for m in modules if m.startswith("gemmtuned.kernels")} == COUNTING
    assert not modules & {*OF_RECORDS, "gemmtuned._testing.fault_rules"}
    assert told["frozen"] == []
    assert modules - {*bundle.names()} == BEFORE
    assert len(modules) <= MOST, sorted(modules)


@pytest.mark.long
def test_a_program_with_a_table_imports_what_its_rows_need(home: Home) -> None:
    publish(home.path / "configs", [published(replace(LINEAR, m=64), "torch_swap")], 1)
    modules = {*home.run(PROGRAM, "table", fresh=True).said["modules"]}

    assert {m for m in modules if m.startswith("gemmtuned.kernels")} == COUNTING | {"gemmtuned.kernels.cublaslt"}
    assert modules >= OF_RECORDS
    assert len(modules) <= MOST + MOST_OF_A_TABLE, sorted(modules)


@pytest.mark.parametrize("table", [False, True])
def test_our_thread_imports_nothing_while_the_program_may_go_through_the_modules(home: Home, table: bool) -> None:
    """A loop over `sys.modules` fails where another thread adds to them."""
    if table:
        publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.bare().run(
        """
        import json, sys, torch
        before = {*sys.modules}
        import gemmtuned
        from gemmtuned.hooks import activate
        hook = activate.current()
        assert gemmtuned.ready(30)
        for _ in range(3):
            torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
            with hook.flusher._lock:
                hook.flusher._flush()
        gemmtuned.disable()
        print(json.dumps(sorted({*sys.modules} - before)))
        """,
    )

    assert home.counts() == {("fp32:4x8x16,threads=2", "exact" if table else "miss"): 3}
    assert done.said == []


def test_a_program_without_the_library_finds_no_new_module_and_no_garbage(home: Home, tmp_path: Path) -> None:
    done = home.bare().run(
        """
        import gc, json, sys, torch
        before = {*sys.modules}
        import gemmtuned
        from gemmtuned.hooks import activate
        hook = activate.current()

        def turns():
            for _ in range(3):
                hook.patches.look_again(float("inf"))
                hook.flusher.turn()

        turns()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        turns()
        gc.collect()
        garbage = [repr(it) for it in gc.garbage]
        gemmtuned.disable()
        print(json.dumps([hook.path, garbage, sorted({*sys.modules} - before)]))
        """,
        GEMMTUNED_CACHE=str(tmp_path / "empty"),
    )

    assert done.said == ["off", [], []]


def test_our_thread_leaves_no_garbage_for_a_program_that_looks_for_leaks(home: Home) -> None:
    done = home.run(
        """
        import gc, json, torch
        from gemmtuned.hooks import activate
        hook = activate.current()
        x, w = torch.ones(4, 16), torch.ones(16, 8)

        def turns():
            for _ in range(3):
                torch.mm(x, w)
                hook.flusher.turn()

        turns()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        turns()
        gc.collect()
        print(json.dumps([repr(it) for it in gc.garbage]))
        """
    )

    assert done.said == []


@pytest.mark.parametrize(
    "device", [cpu_device(), H200, replace(H200, kind="rocm", arch="gfx942")], ids=lambda d: d.kind
)
def test_a_program_has_the_stamps_that_a_worker_has(device: Device) -> None:
    """Those that are made of sources once a row asks for them."""
    whole = backends.environment(device).stamps
    here = Here(device, stamps.of(stamps.LIBRARIES, device))
    of_sources = {name for name in whole if name.partition(".")[0] in stamps.COMPILED}
    first = dict(here.stamps)

    assert first == {name: stamp for name, stamp in whole.items() if name not in of_sources}
    assert all(here.accepts(name.partition(".")[0], stamp) for name, stamp in whole.items())
    assert here.stamps == whole
    assert bool(of_sources) == (device is H200)
    assert not here.accepts("triton", "gemv/0/sm_90/0") and not here.accepts("another", "1")


def test_each_backend_that_a_program_runs_has_stamps_without_the_backend() -> None:
    assert {*stamps.LIBRARIES, *stamps.COMPILED} == {*NATIVE_CODES, *BY_OPS}
    of_records = {name for name, b in backends.BACKENDS.items() if isinstance(b, OperatorBackend)}  # package, version
    ours = {name for name, b in backends.BACKENDS.items() if type(b).__module__.startswith("gemmtuned.")}
    assert ours - of_records == {*stamps.LIBRARIES, *stamps.COMPILED}


def test_stamps_that_a_row_asks_for_reach_the_store(home: Home) -> None:
    """The store is told of them with the next counts, though it has the environment already."""
    from gemmtuned.configs.sighting import Sighting
    from gemmtuned.db.guest import GuestStore

    store = GuestStore(home.path / "tune.db", locks=home.path, timeout_s=1.0)
    here = Here(H200, stamps.of(stamps.LIBRARIES, H200))
    gemm = replace(LINEAR, threads=0)

    def told() -> list[tuple[str]]:
        store.sightings.add("run", here, [Sighting(gemm, "miss", 1)], now_s=1.0)
        sql = "SELECT DISTINCT backend FROM environment_stamp ORDER BY backend"
        return [row[0] for row in store._db.read(lambda conn: conn.execute(sql).fetchall())]

    assert "triton" not in told()
    here.accepts("triton", "")
    assert "triton" in told()


@pytest.mark.long
def test_a_program_takes_the_code_of_modules_from_their_file(home: Home, tmp_path: Path) -> None:
    build(home.cache)
    shutil.copytree(home.cache / "native", tmp_path / "native", copy_function=shutil.copy2)
    for file in tmp_path.glob("native/modules-*.bin"):
        facts, entries = marshal.loads(file.read_bytes())
        *entry, _ = entries["gemmtuned.hooks.followers"]
        code = compile(Path(entry[0]).read_text() + "\nfrom_file = True\n", entry[0], "exec")
        file.write_bytes(marshal.dumps((facts, {**entries, "gemmtuned.hooks.followers": (*entry, code)})))
    done = home.run(
        """
        import json, sys, torch
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        followers = sys.modules["gemmtuned.hooks.followers"]
        print(json.dumps([getattr(followers, "from_file", False), [type(f).__module__ for f in sys.meta_path]]))
        """,
        fresh=True,
        GEMMTUNED_CACHE=str(tmp_path),
    )
    from_file, finders = done.said
    assert from_file
    assert "gemmtuned.configs.bundle" not in finders
    assert home.calls() == 1
