"""The child's half of a worker: it takes one order after another, measures, and sends what it finds.

Only `worker.Worker` starts it.  It is the only part of the daemon that imports torch.  Before that it makes itself
harmless: it has the lowest priority for CPU and disk, is the first to be killed when memory runs out, writes no core
files, and ends with its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from gemmtuned.configs.errors import GemmtunedError, TryLater
from gemmtuned.configs.passing import MEMORY, lack_in
from gemmtuned.configs.priority import give_way
from gemmtuned.configs.solution import Device, Environment, Solution, cpu_device
from gemmtuned.daemon.protocol.wire import (
    Failed,
    Found,
    Hello,
    Inbox,
    LeftOut,
    Message,
    Order,
    Runs,
    Trial,
    encode,
    receive,
)
from gemmtuned.kernels.other_packages import GUESTS

logger = logging.getLogger("gemmtuned.daemon.seats.worker")
_PR_SET_PDEATHSIG: Final = 1
Search = Callable[..., Solution | tuple[Solution, ...]]


def main(argv: list[str] | None = None) -> int:
    """Serve orders until the parent hangs up; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gemmtuned.daemon.child.worker_main")
    parser.add_argument("fd", type=int)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nice", type=int, default=19)
    parser.add_argument("--memory-cap", type=int, default=0)
    parser.add_argument("--search", default="")
    parser.add_argument("--without", default="[]", help="names that are left out, as JSON")
    parser.add_argument("--ended", default="{}", help="pieces of other packages that ended a worker, as JSON")
    args = parser.parse_args(argv)
    os.set_inheritable(args.fd, False)
    die_with(args.parent)
    make_harmless(args.nice)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with socket.socket(fileno=args.fd) as sock:
        threading.Thread(target=_end_at_hangup, args=(args.fd,), daemon=True).start()
        try:
            _work(sock, args)
        except Exception:
            traceback.print_exc()  # before the socket closes: then the parent reads this output
            return 1
    return 0


def _work(sock: socket.socket, args: argparse.Namespace) -> None:
    GUESTS.without, GUESTS.ended = tuple(json.loads(args.without)), json.loads(args.ended)
    _tell_of_guests(sock)
    tune, environment = load(args.search, args.device)
    if environment.device.kind == "cpu":
        sock.sendall(encode(Hello(environment)))
        serve(sock, tune, environment)
        return
    from gemmtuned.daemon.child.worker_cuda import Speaker, cap_memory, check_device, recover

    cap_memory(args.memory_cap)
    check_device()
    speaker = Speaker(sock)
    speaker.start()
    _tell_of_guests(speaker)  # two threads speak from now on
    speaker.sendall(encode(Hello(environment)))
    serve(speaker, tune, environment, after_failure=recover)


class Line(Protocol):
    """The connection to the parent, as far as the worker uses it."""

    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...


def _tell_of_guests(sock: Line) -> None:
    """Have the parent know what of other packages runs, and what is left out."""
    GUESTS.tell = lambda piece, package: sock.sendall(encode(Runs(piece, package)))
    GUESTS.say = lambda name, why, wanted: sock.sendall(encode(LeftOut(name, why, wanted)))


def serve(
    sock: Line, tune: Search, environment: Environment, *, after_failure: Callable[[], object] = lambda: None
) -> None:
    """Answer each order with trials and then one Found or Failed, until the parent closes the connection.

    after_failure: called before a failure is reported; ends the process when it cannot go on.
    """
    inbox = Inbox()
    while True:
        try:
            orders = receive(sock, inbox)
        except ConnectionError:
            return
        if orders is None:
            return
        for order in orders:
            if isinstance(order, Order):
                sock.sendall(encode(_carry_out(order, sock, tune, environment, after_failure)))


def _carry_out(
    order: Order, sock: Line, tune: Search, environment: Environment, after_failure: Callable[[], object]
) -> Message:
    def emit(trial: Trial) -> None:
        if trial.phase != "start" and trial.outcome in ("refused", "wrong"):
            after_failure()
            lack = lack_in(trial.note)
            if lack:  # another day it may be there, so the candidate may be tried again
                trial = replace(trial, outcome="oom" if lack == MEMORY else "hindered")
        sock.sendall(encode(trial))

    try:
        found = tune(
            order.members,
            order.covers,
            order.target,
            environment,
            mode=order.mode,
            skip=frozenset(order.skip),
            emit=emit,
            options=order.options,
        )
    except GemmtunedError as err:
        failed = Failed(str(err), later=isinstance(err, TryLater))
    except MemoryError:
        failed = Failed("out of memory")
    except Exception as err:  # a bug in a backend is this problem's failure, not the worker's end
        logger.exception("tuning failed problem=%s", order.target)
        failed = Failed(f"{type(err).__name__}: {err}")
    else:
        first, *others = (found,) if isinstance(found, Solution) else found
        return Found(first, tuple(others))
    after_failure()  # after the `except`: its error kept the operands of the search alive
    return failed


def load(search: str, device: str) -> tuple[Search, Environment]:
    """The search function and the environment: ours, or those of the file a test named."""
    if not search:
        from gemmtuned.daemon.child.search import tune_modes
        from gemmtuned.kernels import backends, families
        from gemmtuned.kernels.backends import environment as environment_of
        from gemmtuned.kernels.families import tunable

        families.add_others()
        backends.add_others()
        here = device_of(device)
        environment = replace(environment_of(here), tunable=tunable(here.kind))
        GUESTS.say_unused()
        return tune_modes, environment
    path, _, name = search.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    planted: Search = getattr(module, name)
    return planted, module.environment(device)


def device_of(name: str) -> Device:
    """The kind of the device that we were told to measure on. Raises GemmtunedError when there is none of that name."""
    if name == "cpu":
        return cpu_device()
    if name.startswith(("GPU-", "rocm:GPU-")):  # the parent made this one visible, as cuda:0
        from gemmtuned.kernels.device import cuda_device

        return cuda_device(0)
    raise GemmtunedError(f"no device {name!r} that can be tuned on this machine")


def die_with(parent: int) -> None:
    """Have the operating system kill us when the parent dies; end now if it is dead already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl, so the signal would never come
        os._exit(0)


def make_harmless(nice: int) -> None:
    """Give way to everything else on the machine. Steps that fail are skipped, since none is vital."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent uses it to end us at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    give_way(nice)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    import psutil

    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _end_at_hangup(fd: int) -> None:
    """End when the parent's end of the socket is closed, for systems without PDEATHSIG."""
    poller = select.poll()
    poller.register(fd, getattr(select, "POLLRDHUP", 0))
    while not any(
        event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)) for _, event in poller.poll()
    ):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
