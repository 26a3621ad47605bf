"""Programs that fork while a flush goes on: nothing is shared, lost or held up."""

import json

import pytest
from flushed_work import WORK
from hooked import Home

from gemmtuned.db.lockfile import LockFile

ONE = "fp32:4x8x16,threads=2"


@pytest.mark.long
def test_forks_at_any_moment_share_nothing_and_lose_nothing(home: Home) -> None:
    done = home.run(
        """
        import json, os, threading, torch
        from gemmtuned.hooks import activate
        a, b = torch.ones(4, 16), torch.ones(8, 16).t()
        stop, calls = threading.Event(), []
        torch.mm(a, b)  # what torch sets up in its first product is for ever half done in a child forked meanwhile

        def work():
            n = 1
            while not stop.is_set():
                torch.mm(a, b)
                n += 1
            calls.append(n)

        def flush():
            while not stop.is_set():
                activate.current().flusher.flush()

        activate.current().flusher.flush()
        threads = [threading.Thread(target=work), threading.Thread(target=flush)]
        [t.start() for t in threads]
        codes = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                # not the tensors of `work`: torch locks b in a call, and it may be forked locked, with or without us
                a, b = torch.ones(4, 16), torch.ones(8, 16).t()
                for _ in range(3):
                    torch.mm(a, b)
                t = threading.Thread(target=torch.mm, args=(a, b))
                t.start()
                t.join()
                hook = activate.current()
                hook.stop()
                os._exit(0 if hook.flusher.calls == 4 else 7)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        [t.join() for t in threads]
        activate.current().flusher.flush()
        print(json.dumps([codes, calls[0]]))
        """
    )
    codes, calls = done.said

    assert codes == [0] * 20
    assert done.ours == []
    assert home.counts() == {(ONE, "miss"): calls + 80}


def test_a_child_that_was_forked_in_the_middle_of_a_flush_runs_and_leaves_the_store_alone(home: Home) -> None:
    done = home.run(
        """
        import json, os, threading, torch
        from gemmtuned.hooks import activate
        a, b = torch.ones(4, 16), torch.ones(8, 16).t()
        flusher = activate.current().flusher
        entered, leave = threading.Event(), threading.Event()

        def stuck():
            def wait():
                entered.set()
                leave.wait(20)

            with flusher._lock:  # as a flush that waits for a disk
                flusher._at(wait)

        thread = threading.Thread(target=stuck)
        thread.start()
        entered.wait()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            a, b = torch.ones(4, 16), torch.ones(8, 16).t()
            torch.mm(a, b)
            hook = activate.current()
            hook.flusher.report_failure(None, "never told")
            hook.flusher.flush()
            hook.stop()
            dropped = hook.flusher.dropped
            activate.activate()  # nor does switching on again, or another fork, make SQLite whole
            grandchild = os.fork()
            if grandchild == 0:
                torch.mm(a, b)
                activate.current().flusher.flush()
                os._exit(0 if activate.current().flusher._store is None else 9)
            gone = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
            activate.current().flusher.flush()
            os.write(write, json.dumps([dropped, activate.current().flusher._store is None, gone]).encode())
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        leave.set()
        thread.join()
        print(json.dumps([code, json.loads(os.read(read, 100))]))
        """
    )
    assert done.said == [0, [1, True, 0]]
    assert "forked in the middle of a flush" in done.err


@pytest.mark.long
def test_a_fork_while_the_hook_imports_leaves_no_lock_held_in_the_child(home: Home) -> None:
    done = home.run(
        """
        import importlib.abc, json, os, sys, threading, time, torch
        import gemmtuned
        from gemmtuned.hooks import activate

        class Slow(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "gemmtuned.db.guest" and not begun.is_set():
                    begun.set()
                    time.sleep(1.5)

        begun = threading.Event()
        assert "gemmtuned.db.guest" not in sys.modules
        sys.meta_path.insert(0, Slow())
        gemmtuned.enable()
        assert begun.wait(10)
        child = os.fork()
        if child == 0:
            for _ in range(7):
                torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
            activate.current().stop()
            os._exit(0)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        """,
        fresh=True,
        timeout_s=40,
        AITER_TUNE_GEMM="0",
    )

    assert done.said == 0
    assert home.calls() == 7


def test_a_program_that_forks_is_not_held_up_by_a_flush_that_waits(home: Home) -> None:
    assert home.run(WORK).code == 0
    lock = LockFile(home.path / "locks" / "tune.db.lock")
    assert lock.acquire(1.0)
    done = home.run(
        WORK
        + """
    import json
    from gemmtuned.hooks import activate
    activate.current().flusher.flush()  # what it imports is imported: for that a fork does wait
    times = []
    for _ in range(5):
        work(1)
        time.sleep(0.1)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(0)
        times.append(time.monotonic() - began)
        os.waitpid(child, 0)
    print(json.dumps(max(times)))
    sys.stdout.flush()
    os._exit(0)
    """
    )
    lock.release()

    assert json.loads(done.out) < 0.5


def test_a_fork_waits_for_the_last_flush_of_a_hook_that_is_switched_off(home: Home) -> None:
    """By another thread: a child forked meanwhile could neither count nor use SQLite itself."""
    assert home.run(WORK).code == 0
    done = home.run(
        WORK
        + """
    import json, threading
    import gemmtuned
    from gemmtuned.db.lockfile import LockFile
    from gemmtuned.hooks import activate

    work(1)
    flusher = activate.current().flusher
    flusher.flush()
    work(3)
    lock = LockFile(activate.current().settings.locks / "tune.db.lock")
    assert lock.acquire(1.0)
    threading.Timer(0.4, lock.release).start()
    thread = threading.Thread(target=gemmtuned.disable)
    thread.start()
    while not flusher.in_store:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        gemmtuned.enable()
        work(5)
        gemmtuned.disable()
        os._exit(0)
    flushes = flusher.in_store
    thread.join()
    print(json.dumps([flushes, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]))
    """
    )
    assert done.said == [False, 0]
    assert done.ours == []
