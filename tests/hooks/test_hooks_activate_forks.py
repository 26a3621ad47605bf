"""The hook is switched on or off while the program forks, by Python or by C."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hooked import Home

from gemmtuned.hooks.native import our_thread


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="this Python ends a child that was told without its parent")
def test_a_child_of_a_fork_by_c_is_told_by_its_server_alone_and_counts(home: Home) -> None:
    """uWSGI and others that embed Python fork by themselves, and tell Python so in the child."""
    done = home.run(
        """
        import ctypes, json, os, sys, time, torch, gemmtuned
        from hooked import opened, wait_for
        from gemmtuned.hooks.activate import current
        x, w = torch.ones(4, 16), torch.ones(16, 8)
        torch.mm(x, w)
        flusher = current().flusher
        wait_for(lambda: flusher.calls == 1 and flusher._has_session and not flusher.in_store)
        if os.fork() == 0:  # as one that Python did before: what was noted for it is no word on the next
            os._exit(0)
        os.wait()
        if ctypes.PyDLL(None).fork() == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            fds = [where for where in opened().values() if "inotify" in where]
            for _ in range(7):
                torch.mm(x, w)
            wait_for(lambda: gemmtuned.status()["calls"] == 7 and not gemmtuned.disable())
            os._exit(len(fds))
        print(json.dumps(os.waitstatus_to_exitcode(os.wait()[1])))
        """
    )
    assert done.said == 0
    assert done.ours == []
    assert home.calls() == 8


def test_a_child_of_a_fork_by_c_of_which_nobody_tells_python_counts_as_it_goes_and_nothing_twice(home: Home) -> None:
    """As workers of uWSGI are, unless it is asked to tell."""
    done = home.run(
        """
        import ctypes, json, os, sys, time, torch, gemmtuned
        from hooked import wait_for
        from gemmtuned.hooks.activate import current
        x, w = torch.ones(4, 16), torch.ones(16, 8)
        torch.mm(x, w)
        flusher = current().flusher
        wait_for(lambda: flusher.calls == 1 and not flusher._pending and not flusher.in_store)
        torch.mm(x, w)
        wait_for(lambda: flusher.calls == 2)
        assert len(flusher._pending)  # until the fifth flush
        fork, codes = ctypes.CDLL(None).fork, []
        if fork() == 0:  # one that counts nothing, and ends as programs do
            sys.exit(0)
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
        if fork() == 0:  # one that runs on
            for _ in range(7):
                torch.mm(x, w)
            wait_for(lambda: current().flusher is not flusher and gemmtuned.status()["calls"] == 7)
            wait_for(lambda: not current().flusher._pending)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
        print(json.dumps(codes))
        """,
        GEMMTUNED_FLUSH_S="0.3",
    )
    assert done.said == [0, 0]
    assert home.calls() == 9


@pytest.mark.parametrize("library", ["CDLL", "PyDLL", "CDLL, after forks by Python"])
def test_a_fork_by_c_finds_our_thread_asleep_so_that_the_child_can_have_pythons_lock(home: Home, library: str) -> None:
    """CDLL: without Python's lock, as uWSGI; PyDLL: with it."""
    done = home.run(
        """
        import ctypes, json, os, select, sys, time, torch
        from gemmtuned.hooks import activate
        from gemmtuned.hooks.activate import current

        def busy():
            until_s = time.monotonic() + 0.02
            while time.monotonic() < until_s: pass

        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        current().flusher._tick = busy
        for _ in range(9 if "after" in sys.argv[1] else 0):  # some find it asleep, and some at work
            busy()
            child = os.fork() or os._exit(0)
            os.waitpid(child, 0)
        fork, hung = getattr(ctypes, sys.argv[1].split(",")[0])(None).fork, 0
        for _ in range(12):
            busy()
            child = fork()
            if child == 0:
                busy()
                os._exit(0)
            ended = os.pidfd_open(child)
            hung += not select.select([ended], [], [], 10 if not hung else 0.5)[0]
            os.close(ended), os.kill(child, 9), os.waitpid(child, 0)
        print(json.dumps(hung))
        """,
        library,
        GEMMTUNED_FLUSH_S="0.02",
    )
    assert done.said == 0


def test_a_fork_by_python_is_told_to_the_library_as_its_first_and_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no hook is on: else it waits for the thread of one that is being switched off, and hangs from 3.13 on.

    Hooks before a fork are called from the last one on, so the library's are registered after those written in Python.
    """
    registered: list[dict[str, object]] = []
    monkeypatch.setattr(our_thread, "os", SimpleNamespace(register_at_fork=lambda **hooks: registered.append(hooks)))
    for name in ("_knows_of_forks", "_to_register", "_python_knows"):
        monkeypatch.setattr(our_thread, name, [])
    library: Any = SimpleNamespace(gt_before_python_fork="first", gt_after_python_fork="last")
    our_thread.knows_of_forks(library)
    assert registered == []
    our_thread.python_tells()
    our_thread.python_tells()
    our_thread.knows_of_forks(library)
    assert registered == [{"before": "first", "after_in_parent": "last"}]


def test_a_child_forked_while_the_last_flush_of_a_hook_is_in_sqlite_keeps_from_it(home: Home) -> None:
    done = home.run(
        """
        import os, threading, torch, gemmtuned
        from gemmtuned.hooks import flush
        from gemmtuned.hooks.activate import current
        from hooked import wait_for

        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        hook = current()
        wait_for(lambda: hook.flusher.calls == 1 and not hook.flusher.in_store)
        finishes, goes_on, usual = threading.Event(), threading.Event(), hook.account.finish

        def finish(*how):
            hook.flusher.in_store = True
            finishes.set()
            goes_on.wait(10)
            hook.flusher.in_store = False
            usual(*how)

        hook.account.finish = finish
        off = threading.Thread(target=gemmtuned.disable)
        off.start()
        finishes.wait(10)
        if os.fork() == 0:
            os._exit(7 if flush._no_store else 0)
        kept = os.waitstatus_to_exitcode(os.wait()[1])
        goes_on.set()
        off.join()
        print(kept + bool(flush._no_store))
        """
    )
    assert done.said == 7


def test_an_interrupt_while_a_fork_is_prepared_leaves_the_thread_and_the_locks_as_they_were(home: Home) -> None:
    done = home.run(
        """
        import json, os, time, torch, gemmtuned
        from gemmtuned.hooks import activate, imports
        from hooked import wait_for
        x, w = torch.ones(4, 16), torch.ones(16, 8)
        torch.mm(x, w)
        flusher = activate.current().flusher
        wait_for(lambda: flusher.calls == 1 and flusher._has_session and not flusher.in_store)

        def interrupted(hook, fork):
            raise KeyboardInterrupt  # as a signal's handler would, which Python then says and forgets

        for name in ("pause_flushes", "before_fork"):
            stock = getattr(activate.Hook, name)
            setattr(activate.Hook, name, interrupted)
            if os.fork() == 0:
                torch.mm(x, w)
                os._exit(0 if gemmtuned.status()["note"] == "" else 1)
            setattr(activate.Hook, name, stock)
            assert os.wait()[1] == 0
        torch.mm(x, w)
        wait_for(lambda: gemmtuned.status()["calls"] == 2)
        print(json.dumps(imports._lock.enter(0.0)))
        """
    )
    assert done.said is True
    assert done.ours == []
