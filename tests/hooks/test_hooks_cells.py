"""What the hook changes in a process that is not ours: the cells of docs/in-your-process.md; a wrong one is seen."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, STUB, ForkServer, Home, publish, published
from operators_of_torch import OPERATORS

from gemmtuned.hooks.background import FAULTS

DOCS = Path(__file__).resolve().parents[2] / "docs/in-your-process.md"
Cell = dict[str, Any]

LOOK = """
    import atexit, contextlib, gc, hashlib, json, os, random, re, resource, signal, subprocess, sys, threading, time
    import types, warnings
    import torch
    import torch.nn.functional as F
    from torch import nn
    torch.set_num_threads(1)
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    torch.mm(x, w.t())
    WATCHED = [torch, torch.Tensor, torch.nn, F, torch._C, torch._C._nn, torch._C.TensorBase, torch.ops.aten,
               torch.library, torch.autograd.Function, nn.Module, os, sys, threading, threading.Thread, signal, atexit,
               warnings, subprocess, subprocess.Popen, time, gc, __import__("builtins"), __import__("logging"), types]
    WATCHED += [each for each in vars(nn).values() if isinstance(each, type)]

    def functions():  # of what is watched: name -> what it is
        return {f"{getattr(owner, '__name__', owner)}.{name}": value for owner in WATCHED
                for name, value in list(vars(owner).items()) if callable(value)}

    handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
    before = functions()

    def others(now, then):
        return sorted(str(name) for name in then if now.get(name) is not then[name])

    def children():  # that there are, and that there have been
        try:
            os.waitpid(-1, os.WNOHANG)
            return True
        except ChildProcessError:
            return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0

    def masks():
        blocked = []
        for task in os.listdir("/proc/self/task"):
            text = open(f"/proc/self/task/{task}/status").read()
            blocked.append(int(re.search(r"SigBlk:\\s*(\\w+)", text)[1], 16))
        return sorted(blocked)

    def registered():  # operators of which a kernel has come from a file of ours
        names = torch._C._dispatch_get_all_op_names()
        return sorted(name for name in names if "hooks/native/" in torch._C._dispatch_dump(name))

    def opened():
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # a thread has closed it meanwhile
                yield os.readlink(f"/proc/self/fd/{fd}")

    def look():
        return {
            "threads": [len(os.listdir("/proc/self/task")), [t.name for t in threading.enumerate()]],
            "descriptors": sorted(opened()),
            "mappings": sorted({line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line}),
            "children": children(),
            "modules": sorted({m.split(".")[0] for m in sys.modules if not m.startswith("gemmtuned")}),
            "ours": sorted(m for m in sys.modules if m.startswith("gemmtuned")),
            "signals": others({n: signal.getsignal(n) for n in signal.valid_signals()}, handlers),
            "masks": masks(),
            "atexit": atexit._ncallbacks(),
            "environment": sorted(os.environ.items()),
            "filters": [repr(f) for f in warnings.filters],
            "functions": others(functions(), before),
            "dispatcher": registered(),
            "path": list(sys.path), "finders": [repr(each) for each in sys.meta_path],
            "trace": [repr(sys.gettrace()), repr(sys.getprofile())],
            "umask": re.search(r"Umask:\\s*(\\w+)", open("/proc/self/status").read())[1],
            "folder": os.getcwd(), "torch's threads": torch.get_num_threads(),
            "random numbers": [hashlib.sha256(repr(state).encode()).hexdigest() for state in
                               (random.getstate(), torch.get_rng_state().tolist())],
        }
"""

PLANTS = """
    def plant():
        global planted
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        child = subprocess.Popen(["sleep", "60"])
        fd = os.open("/etc/passwd", os.O_RDONLY)
        import mmap
        mapped = mmap.mmap(fd, 1, prot=mmap.PROT_READ)
        sys.modules["pandas"] = types.ModuleType("pandas")
        signal.signal(signal.SIGUSR1, lambda *_: None)
        atexit.register(work), atexit.register(work.__call__), atexit.register(print, end="")
        os.environ["PLANTED"] = "1"
        warnings.filterwarnings("ignore", message="planted")
        linear = F.linear
        F.linear = lambda *args: linear(*args)
        made = {"Library": torch.library.Library}
        exec(compile("library = Library('aten', 'IMPL')", "/hooks/native/planted.py", "exec"), made)  # its place
        library = made["library"]
        library.impl("relu", lambda t: t, "CPU")
        sys.path.append("/planted"), sys.meta_path.append(sys.meta_path[0]), sys.setprofile(lambda *_: None)
        os.umask(0o77), os.chdir("/"), torch.set_num_threads(2)
        random.random()
        planted = end, thread, child, fd, mapped, linear, library

    def undo():
        end, thread, child, fd, mapped, linear, library = planted
        sys.setprofile(None)
        end.set(), thread.join(), child.kill(), child.wait(), mapped.close(), os.close(fd)
        del sys.modules["pandas"], os.environ["PLANTED"]
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        atexit.unregister(work), atexit.unregister(work.__call__), atexit.unregister(print)
        warnings.filters.pop(0)
        F.linear = linear
        library._destroy()
        random.setstate(numbers)
        sys.path.pop(), sys.meta_path.pop(), os.umask(0o22), os.chdir(folder), torch.set_num_threads(1)
    """

PROGRAM = """
    off, folder, numbers = look(), os.getcwd(), random.getstate()
    import gemmtuned

    def wait_for(look):  # and import nothing
        until = time.monotonic() + 30
        while not (found := look()):
            assert time.monotonic() < until
            time.sleep(0.003)
        return found

    def work():
        torch.mm(x, w.t())

    def between_flushes():  # in which the store is open, and /proc/PID/stat and what is imported for a moment
        found = look()
        opened = any("tune.db" in fd or fd.endswith(("/stat", ".py", ".pyc")) for fd in found["descriptors"])
        written = os.path.exists(os.environ["GEMMTUNED_HOME"] + "/tune.db")
        if not written or opened or "sqlite3" not in found["modules"]:
            return None
        time.sleep(0.1)  # the first flush imports, which takes a while
        again = look()
        return found if found == again else None

    def enabled():
        gemmtuned.enable()
        for _ in range(20):
            work()
        wait_for(lambda: gemmtuned.generation() == 1 and gemmtuned.status()["calls"] >= 20)
        work()  # routed

    enabled()
    on = wait_for(between_flushes)
    gemmtuned.disable()
    after = look()
    enabled()
    plant()
    wrong_on = wait_for(between_flushes)
    undo()
    gemmtuned.disable()
    plant()
    wrong_after = look()
    undo()
    print(json.dumps([off, on, after, wrong_on, wrong_after]))
    """


@dataclass
class Cells:
    """Of one process: off, on between two flushes with a table in use, and after disable()."""

    off: Cell
    on: Cell
    after: Cell


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: ForkServer) -> list[Cell]:
    """off, on, after; then of the same process, once more on and after, with what may not be planted."""
    home = Home(tmp_path_factory.mktemp("guest") / "home", native_cache, fork_server).bare()
    home.path.mkdir()
    publish(home.path / "configs", [published(replace(LINEAR, threads=1), "torch_swap")], 1)
    found: list[Cell] = home.run(LOOK + PLANTS + PROGRAM, AITER_TUNE_GEMM="0").said
    return found


@pytest.fixture(scope="module")
def cells(planted: list[Cell]) -> Cells:
    return Cells(*planted[:3])


# ---- the cells


def threads(cells: Cells) -> None:
    off, on, after = (cell["threads"] for cell in (cells.off, cells.on, cells.after))
    assert on == [off[0] + 1, ["MainThread"]]
    assert after == off


def descriptors(cells: Cells) -> None:
    more = list(cells.on["descriptors"])
    for each in cells.off["descriptors"]:
        more.remove(each)
    assert more == ["anon_inode:inotify"]
    assert cells.after["descriptors"] == cells.off["descriptors"]


def mappings(cells: Cells) -> None:
    more, left = ({*cell["mappings"]} - {*cells.off["mappings"]} for cell in (cells.on, cells.after))
    libraries = {each for each in more if re.search(r"/gemmtuned[^/]*\.so$|/native/[^/]*\.so$", each)}
    sqlite = {each for each in more if "sqlite3" in Path(each).name}  # the standard library's, as a module of it
    pages = {each for each in more if each.startswith("/dev/shm/")}  # of a table on probation, for a minute
    assert more == libraries | sqlite | pages
    assert (len(libraries), len(pages)) == (1, 1)
    assert left == libraries | sqlite


def children(cells: Cells) -> None:
    if cells.off["children"]:
        pytest.skip("this torch starts a process of its own when it is imported")
    assert not cells.on["children"] and not cells.after["children"]


def modules(cells: Cells) -> None:
    off, on, after = ({*cell["modules"]} for cell in (cells.off, cells.on, cells.after))
    assert after - off == {"sqlite3", "_sqlite3"}, "torch has imported all else before"
    assert off < on <= after
    assert cells.off["ours"] == STUB
    assert {*STUB} < {*cells.on["ours"]} <= {*cells.after["ours"]}


def signals(cells: Cells) -> None:
    assert cells.off["signals"] == cells.on["signals"] == cells.after["signals"] == []
    ours = list(cells.on["masks"])
    for each in cells.off["masks"]:
        ours.remove(each)
    assert len(ours) == 1
    takes = {number for number in signal.valid_signals() if not ours[0] >> (number - 1) & 1}
    assert takes - {signal.SIGKILL, signal.SIGSTOP} == {*FAULTS}
    assert cells.after["masks"] == cells.off["masks"]


def at_exit(cells: Cells) -> None:
    assert cells.on["atexit"] == cells.after["atexit"] == cells.off["atexit"] + 2


def same_functions(cells: Cells) -> None:
    assert cells.off["functions"] == cells.on["functions"] == cells.after["functions"] == []


def finders(cells: Cells) -> None:
    more = [each for each in cells.on["finders"] if each not in cells.off["finders"]]
    assert [each.split()[0] for each in more if "hooks" in each] == ["<gemmtuned.hooks.compiled._OnImport"]
    assert len(more) == 1
    assert cells.after["finders"] == cells.off["finders"]


def dispatcher(cells: Cells) -> None:
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith("| dispatcher"))
    on = [name for name in cells.on["dispatcher"] if not name.startswith("gemmtuned::")]
    assert cells.off["dispatcher"] == []
    assert "(reference/operators.md)" in row  # which `make check` compares with the list
    assert {name.removeprefix("aten::") for name in on} == {*OPERATORS.everywhere}
    assert cells.after["dispatcher"] == cells.on["dispatcher"]


def as_it_was(what: str) -> Callable[[Cells], None]:
    def check(cells: Cells) -> None:
        assert cells.off[what] == cells.on[what] == cells.after[what]

    return check


SAME = ("environment", "filters", "path", "trace", "umask", "folder", "torch's threads", "random numbers")
CHECKS = {
    "threads": threads, "descriptors": descriptors, "mappings": mappings, "children": children, "modules": modules,
    "signals": signals, "atexit": at_exit, "functions": same_functions, "dispatcher": dispatcher, "finders": finders,
    **{what: as_it_was(what) for what in SAME},
}  # fmt: skip


@pytest.mark.parametrize("what", CHECKS)
def test_a_cell_is_as_it_is_told(cells: Cells, what: str) -> None:
    CHECKS[what](cells)


@pytest.mark.parametrize("what", CHECKS)
def test_a_cell_that_is_wrong_is_seen(planted: list[Cell], what: str) -> None:
    """While it is on, and after disable()."""
    off, on, after, wrong_on, wrong_after = planted
    for wrong in (Cells(off, wrong_on, after), Cells(off, on, wrong_after)):
        with pytest.raises(AssertionError):
            CHECKS[what](wrong)


@pytest.mark.long
def test_after_disable_the_end_of_a_program_leaves_the_store_as_it_is(home: Home) -> None:
    done = home.run(
        """
        import atexit, os, torch, gemmtuned
        from pathlib import Path
        store = Path(os.environ["GEMMTUNED_HOME"])

        def look():
            return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in store.rglob("*") if f.is_file()}

        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        gemmtuned.disable()
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        before = look()
        atexit._run_exitfuncs()
        print(int(look() == before))
        """,
        fresh=True,
    )
    assert done.said == 1
    assert home.calls() == 1
