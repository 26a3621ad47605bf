"""Programs and forked workers that die in a routed kernel condemn its generation."""

from __future__ import annotations

import contextlib
import signal
import sqlite3

import pytest
from hooked import LINEAR, Home, publish, published

from gemmtuned.hooks.probation import DEATHS

# ---- whole programs

PROGRAM = """
    import os, signal, sys, threading, time, torch, gemmtuned
    from hooked import wait_for
    wait_for(lambda: gemmtuned.generation() == 1 or "is not used" in gemmtuned.status()["note"])
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    torch.nn.functional.linear(x, w)
    print(gemmtuned.generation(), flush=True)
    {end}
    """
IN_A_CALL = """
    import ctypes, mmap
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    gone = torch.frombuffer(memory, dtype=torch.float32, count=4 * 16).view(4, 16)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(gone.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    torch.nn.functional.linear(gone, w)  # the kernel reads what may not be read: SIGSEGV
"""


@pytest.mark.parametrize(
    ("end", "condemned"),
    [
        ("os._exit(0)", False),
        ("raise RuntimeError('its own')", False),
        ("sys.exit(3)", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
        ("import ctypes; ctypes.string_at(0)", False),  # its own SIGSEGV
        (IN_A_CALL, True),
    ],
)
def test_a_generation_is_condemned_by_deaths_in_its_kernels_alone(home: Home, end: str, condemned: bool) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    ended = [home.run(PROGRAM.replace("{end}", end.strip())) for _ in range(DEATHS + 1)]
    said = [one.out for one in ended]

    assert all(one.code == -signal.SIGSEGV for one in ended[:DEATHS]) or not condemned
    assert said == ["1\n"] * DEATHS + (["0\n"] if condemned else ["1\n"])


FAULTY = """
    from gemmtuned.hooks import activate
    hook = activate.current()
    page = hook.tables.probation._state()
    if page is not None:
        page.launched = 1  # as a kernel on a GPU does
        ours = next(iter(hook.table.items()))[2]
        from gemmtuned.hooks import account
        hook.native.fault = lambda: ({fault}, [3])
        account.solution_of = lambda ident: ours
    raise RuntimeError("CUDA error")
"""


@pytest.mark.parametrize(("fault", "condemned"), [(700, True), (0, False)])
def test_programs_that_leave_a_gpu_with_a_fault_condemn_the_generation_and_the_daemon_is_told(
    home: Home, fault: int, condemned: bool
) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    ended = [home.run(PROGRAM.replace("{end}", FAULTY.replace("{fault}", str(fault)).strip())) for _ in range(DEATHS)]
    third = home.run(PROGRAM.replace("{end}", ""))

    assert [one.code for one in ended] == [1] * DEATHS
    assert third.out == ("0\n" if condemned else "1\n")
    with contextlib.closing(sqlite3.connect(home.path / "tune.db")) as conn:
        found = conn.execute("SELECT backend, how, reports FROM quarantine").fetchall()
    assert found == ([("torch_swap", "failed", DEATHS)] if condemned else [])


# ---- forked workers

WORKERS = """
    import ctypes, json, os, torch, gemmtuned
    from hooked import LINEAR, publish, published, wait_for
    from dataclasses import replace
    from importlib.metadata import version
    from gemmtuned.hooks import activate

    lib = torch.library.Library("planted", "DEF")
    lib.define("broken(Tensor x, Tensor w, Tensor? bias) -> Tensor")
    lib.impl("broken", lambda x, w, bias: ctypes.string_at(0), "CPU")
    launch = {"operator": "planted::broken", "schema": "planted::broken(Tensor x, Tensor w, Tensor? bias) -> Tensor",
              "arguments": ["x", "w", "bias"], "contiguous": [], "package": "torch", "version": version("torch"),
              "max_m": 1000}
    hook = activate.current()
    broken = published(LINEAR, "planted", stamp=version("torch"), launch=json.dumps(launch))
    publish(hook.settings.config_dir, [broken], 1)
    wait_for(lambda: gemmtuned.generation() == 1)
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    {before}

    def worker():
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(int(torch.nn.functional.linear(x, w).sum().item() == 512) + 40)

    said = [worker() for _ in range(2)]
    wait_for(lambda: gemmtuned.generation() == 0)
    said += [worker() for _ in range(2)]
    print(json.dumps([said, gemmtuned.status()["note"], len(os.listdir(hook.settings.home / "probation"))]))
    """


@pytest.mark.long
@pytest.mark.parametrize("before", ["", "os.fork() or os._exit(0)"])
def test_a_forked_worker_that_dies_in_a_routed_kernel_condemns_it_for_its_parent_too(home: Home, before: str) -> None:
    """A real SIGSEGV in a planted operator; before: another worker that routes nothing has ended."""
    done = home.run(WORKERS.replace("{before}", before), fresh=True)
    codes, note, files = done.said

    assert codes == [-signal.SIGSEGV] * DEATHS + [41, 41]
    assert "generation 1 is not used before" in note
    assert files == DEATHS
    started = home.run("import time, torch, gemmtuned; time.sleep(1); print(gemmtuned.generation())")
    assert started.out == "0\n"


LOADER = """
    import ctypes, json, torch, gemmtuned
    from hooked import wait_for
    from torch.utils.data import DataLoader

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.nn.functional.linear(x, w)

    said = []
    for _ in range(3):
        try:
            said.append([y.sum().item() for y in DataLoader(Broken(), num_workers=1, multiprocessing_context="fork")])
        except RuntimeError as err:
            said.append("worker" in str(err))
        if len(said) == 2:
            wait_for(lambda: gemmtuned.generation() == 0)
    print(json.dumps([said]))
    """


def test_a_worker_of_a_data_loader_that_dies_in_a_routed_kernel_condemns_it(home: Home) -> None:
    begin = WORKERS.partition("    {before}")[0].replace("(LINEAR,", "(replace(LINEAR, threads=1),")  # as workers have
    done = home.run(begin + LOADER)

    assert done.said == [[True, True, [512.0, 512.0]]]
