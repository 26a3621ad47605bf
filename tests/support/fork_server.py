"""A process that has imported torch, unhooked, and forks a program whenever it is asked: saves two seconds a test.

The program runs as after `import torch` under its own environment: the entry point is called as torch calls it, and
the interpreter ends as it always does, but that the hook may take its time: on a loaded machine half a second is not
enough to make a database.

Packages that declare backends or families are looked for when ours are imported, which is in the server: a program that
is to find one of PYTHONPATH starts fresh.

What the server has is frozen, so that no garbage collection of a program walks through all of torch, and lies in huge
pages, of which a fork is quick.  Threads are joined and exit functions run as always, but for those by which torch
takes back its operators; after them a program is gone at once, unless it asks for its `whole_end`: then the hook has no
more time than anywhere, torch takes back its 134 libraries of operators (0.05 s of CPU), the interpreter all modules
and C++ its static objects (0.2 s).

Orders come as JSON over the socket whose number is its first argument, {code, args, env, whole_end}, each with four or
five descriptors: the program's three streams, a socket on which it answers {pid} and later {status, ended_s, delayed_s,
cpu_s}, and what the program has as descriptor 3.  ended_s is the monotonic clock at the end, delayed_s for how long the
program was ready to run while others had the CPUs, and cpu_s the CPU time of it and of the children that it waited for.
Several processes may send orders.  Its other arguments name modules that programs have imported besides; with `--bare`
nothing of ours is, so that a program imports it as after `import torch`.
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import socket
import sys
import time
import weakref

gc.disable()  # while modules are imported, which are kept: a fifth of their time otherwise
_status = None  # what a program ends with, once that is known and its end is not to be a whole one


def end_at_once() -> None:
    """The last of all exit functions."""
    if _status is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_status)


atexit.register(end_at_once)

BARE = "--bare" in sys.argv
if BARE:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402  what it is all about

if not BARE:
    import gemmtuned.configs.variables
    import gemmtuned.db.guest  # what a program with the hook imports, by the time of its first flush
    import gemmtuned.hooks.activate
    import gemmtuned.hooks.native.library
    import gemmtuned.kernels.backends  # noqa: F401
    from gemmtuned._autoload import autoload
    from gemmtuned._testing import faults

sys.path.insert(0, os.path.dirname(__file__))
from huge_pages import gather  # noqa: E402

del sys.path[0]

MOST_BYTES = 1 << 20


def main() -> None:
    for name in sys.argv[2:]:
        if name != "--bare":
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()
    gather()
    if BARE:
        for name in ("huge_pages", "resource"):  # no program has these of torch
            sys.modules.pop(name, None)
    orders = socket.socket(fileno=int(sys.argv[1]))
    waiting = selectors.DefaultSelector()
    waiting.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is orders:
                text, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, 5)
                if not text:
                    return
                pid = os.fork()
                if pid == 0:
                    let_go(waiting)
                    become(json.loads(text), fds[:3] + fds[4:])
                    return
                answers = socket.socket(fileno=fds[3])
                answers.send(json.dumps({"pid": pid}).encode())
                for fd in fds[:3] + fds[4:]:
                    os.close(fd)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))
            else:
                pid, answers = key.data
                waiting.unregister(key.fileobj)
                os.close(key.fileobj)
                end = {"ended_s": time.monotonic(), "delayed_s": delayed_s(pid)}
                _, status, used = os.wait4(pid, 0)
                end |= {"status": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
                try:
                    answers.send(json.dumps(end).encode())
                except OSError:  # nobody waits for it any more
                    pass
                answers.close()


def let_go(waiting: selectors.BaseSelector) -> None:
    """Close what is the server's, in the objects that have it: they go only when the program's own files are open."""
    for key in waiting.get_map().values():
        if key.data is None:
            key.fileobj.close()
        else:
            os.close(key.fileobj)
            key.data[1].close()
    waiting.close()


def delayed_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def become(order: dict, files: list[int]) -> None:
    os.setsid()  # at a timeout the group is killed with all in it
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    os.closerange(len(files), 1024)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:0] = [p for p in order["env"].get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.argv = ["-c", *order["args"]]
    if not BARE:
        faults._armed = faults._from_env()  # read when the module is imported, which was before
    threads = int(order["env"].get("OMP_NUM_THREADS", torch.get_num_threads()))
    if threads != torch.get_num_threads():  # read when torch is imported
        torch.set_num_threads(threads)
    torchs = list(weakref.finalize._registry)
    if not BARE:
        autoload()
    elif torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    if not order["whole_end"]:
        for finalizer in torchs:
            finalizer.atexit = False
        flush = sys.modules.get("gemmtuned.hooks.flush")  # a bare one may be switched off
        if flush is not None:
            flush.EXIT_S = flush.EXIT_BUSY_S = 60.0
    run(order["code"], order["whole_end"])


def run(code: str, whole_end: bool) -> None:
    global _status
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:  # as `python -c` ends by it
        status = 1
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    except BaseException:
        status = 1
        raise
    finally:
        _status = None if whole_end else status & 0xFF


if __name__ == "__main__":
    main()
