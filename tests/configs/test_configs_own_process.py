"""A forked child is known for one, whoever forked it, though its number may be its parent's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hooked import Home

NAMESPACES = """
    import ctypes, json, os, sys
    libc = ctypes.CDLL(None)

    def forked(run, fork=os.fork):
        pid = fork()
        if pid == 0:
            os._exit(run())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def first_of_a_namespace(run, fork=os.fork):  # its number is 1
        if libc.unshare(0x20000000 | (0 if os.geteuid() == 0 else 0x10000000)):
            print('"refused"')
            sys.exit()
        return forked(run, fork)
    """


KEEPS = """
    from gemmtuned.configs import processes
    page = ctypes.c_char.from_buffer(processes._its_page)
    assert libc.madvise(ctypes.c_void_p(ctypes.addressof(page)), 4096, 19) == 0  # MADV_KEEPONFORK
    """


@pytest.mark.parametrize("as_told", [True, False], ids=["Linux", "an emulator that empties nothing"])
def test_each_child_is_another_process_than_all_that_it_comes_from(home: Home, as_told: bool) -> None:
    done = home.run(
        NAMESPACES
        + ("" if as_told else KEEPS)
        + """
    from gemmtuned.configs.processes import own_process
    seen = [own_process()]

    def child():
        new = own_process()
        assert new not in seen and own_process() == new
        seen.append(new)
        return 0 if len(seen) > 4 else forked(child, libc.fork if len(seen) % 2 else os.fork)

    print(json.dumps([forked(child), forked(child, libc.fork), len(seen), own_process() == seen[0]]))
    """
    )
    assert done.said == [0, 0, 1, True]


@pytest.mark.parametrize("how", ["os.fork", "libc.fork"])
def test_a_child_with_the_number_of_its_parent_has_its_own_counts_and_nothing_of_its_parents_database(
    home: Home, tmp_path: Path, how: str
) -> None:
    done = home.run(
        NAMESPACES
        + f"""
    import torch, gemmtuned
    from pathlib import Path
    from hooked import LINEAR
    from gemmtuned.db import connect
    from gemmtuned.db.store import Store
    from gemmtuned.hooks.activate import current

    def count(times):
        for _ in range(times):
            current().count_op(LINEAR, "cpu")

    def parent():
        count(5)
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        store = Store(Path(sys.argv[1]) / "other.db", locks=Path(sys.argv[1]))
        is_open = lambda: any(one._handle.conn is not None for one in connect._all)
        assert is_open()
        connect.close_all_before_fork.__code__ = (lambda: None).__code__  # as if others used it at this moment

        def child():
            connect._mind_forks()
            inherited = is_open()
            count(3)
            gemmtuned.disable()
            return 10 * inherited + os.getpid()

        code = first_of_a_namespace(child, {how})
        gemmtuned.disable()
        return code

    print(json.dumps(first_of_a_namespace(parent)))
    """,
        str(tmp_path),
        GEMMTUNED_FLUSH_S="60",
    )
    if done.said == "refused":
        pytest.skip("this machine lets nobody make a PID namespace")
    assert done.said == 1
    assert home.calls() == 5 + 1 + 3


def test_a_child_of_c_code_under_an_emulator_has_its_own_counts_and_nothing_of_its_parents_database(home: Home) -> None:
    """One that says it empties a page in each child, and does not."""
    done = home.run(
        NAMESPACES
        + KEEPS
        + """
    import torch, gemmtuned
    from hooked import LINEAR
    from gemmtuned.hooks.activate import current

    def count(times):
        for _ in range(times):
            current().count_op(LINEAR, "cpu")

    def child():
        count(3)
        gemmtuned.disable()
        return 7

    count(5)
    code = forked(child, libc.fork)
    gemmtuned.disable()
    print(json.dumps(code))
    """,
        GEMMTUNED_FLUSH_S="60",
    )
    assert done.said == 7
    assert home.calls() == 5 + 3


def test_an_old_linux_tells_a_child_by_its_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtuned.configs import processes

    monkeypatch.setattr(processes, "_its_page", None)
    assert processes.own_process() == os.getpid()
