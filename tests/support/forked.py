"""Programs in forks of one process that has torch imported, see fork_server.py: started like subprocess.Popen."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# torch's compiler, and what it has imported by the end of its first compilation, which takes a program 0.4 s
COMPILER = (
    "torch._dynamo", "torch._dynamo.backends.debugging", "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd", "torch.distributed.tensor.experimental",
)  # fmt: skip


def kill_group(leader: int) -> None:
    """Kill a program and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Forked:
    """A program that runs: what tests use of subprocess.Popen. Its streams are None where they were given.

    Once it has ended, ended_s is the monotonic clock then, and delayed_s for how long others had the CPUs.
    """

    returncode: int | None = None
    ended_s = delayed_s = 0.0

    def __init__(self, answers: socket.socket, ours: Iterable[int | None], used: Callable[[float], None]) -> None:
        self._answers, self._used = answers, used
        self.pid = int(self._answer(None)["pid"])
        files = [
            None if fd is None else os.fdopen(fd, mode, buffering=1)
            for fd, mode in zip(ours, ("w", "r", "r"), strict=True)
        ]
        self.stdin, self.stdout, self.stderr = files

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            end = self._answer(timeout)
            self.returncode, self.ended_s, self.delayed_s = int(end["status"]), end["ended_s"], end["delayed_s"]
            self._used(end["cpu_s"])
            self._answers.close()
        return self.returncode

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Give it text, and return all that is left of its output and errors once it has ended."""
        until_s = None if timeout is None else time.monotonic() + timeout
        found = {}
        readers = [
            threading.Thread(target=lambda name=name, file=file: found.update({name: file.read()}), daemon=True)
            for name, file in (("out", self.stdout), ("err", self.stderr))
            if file is not None
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            with suppress(BrokenPipeError), self.stdin:
                self.stdin.write(text)
        self.wait(timeout)
        for reader in readers:
            reader.join(None if until_s is None else max(until_s - time.monotonic(), 0))
            if reader.is_alive():  # a child of its own keeps a stream open
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        return found.get("out", ""), found.get("err", "")

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def _answer(self, timeout: float | None) -> dict[str, Any]:
        self._answers.settimeout(timeout)
        try:
            text = self._answers.recv(4096)
        except (BlockingIOError, TimeoutError) as err:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0) from err
        assert text, "the server of forks is gone"
        found: dict[str, Any] = json.loads(text)
        return found


class ForkServer:
    """Starts programs in forks of one process that has torch imported.

    folder: for what programs print, its own in each process.  of: another's process is asked, which runs already.
    used: is told the CPU seconds of each program that has ended.  modules: what is imported beside torch.
    """

    def __init__(
        self, folder: Path, *, of: ForkServer | None = None, used: Callable[[float], None] = lambda seconds: None,
        modules: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._of, self.used, self._modules = of, used, modules
        self._compiling: ForkServer | None = None
        self._bare: ForkServer | None = None

    @property
    def bare(self) -> ForkServer:
        """One that has imported torch and nothing of ours: what a program imports of it is as in one of its own."""
        if self._bare is None:
            of = None if self._of is None else self._of.bare
            self._bare = ForkServer(self._folder, of=of, used=self.used, modules=("--bare",))
        return self._bare

    @property
    def compiling(self) -> ForkServer:
        """One that has imported torch's compiler as well, which takes a program 1.5 s."""
        if self._compiling is None:
            of = None if self._of is None else self._of.compiling
            self._compiling = ForkServer(self._folder, of=of, used=self.used, modules=COMPILER)
        return self._compiling

    def begin(self) -> None:
        """Start the process; programs need not wait for torch when they come."""
        self.running(dict(os.environ))

    def start(
        self, code: str, args: Iterable[str], env: dict[str, str], *, streams: tuple[int, int, int] | None = None,
        whole_end: bool = False,
    ) -> Forked:  # fmt: skip
        """Start a program in a group of its own. streams: its descriptors 0, 1 and 2; without them it gets pipes."""
        orders = self.running(env)
        ours: list[int | None] = [None] * 3
        if streams is None:
            pipes = [os.pipe() for _ in range(3)]
            ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
            theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        else:
            theirs = [*streams]
        answers, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"code": textwrap.dedent(code), "args": [*args], "env": env, "whole_end": whole_end}
        socket.send_fds(orders, [json.dumps(order).encode()], [*theirs, its.fileno()])
        its.close()
        for fd in theirs if streams is None else ():
            os.close(fd)
        return Forked(answers, ours, self.used)

    def run(
        self, code: str, args: Iterable[str], env: dict[str, str], timeout_s: float, *, whole_end: bool = False
    ) -> tuple[int, str, str]:
        """Run a program to its end, which is a kill when the time is over; (exit status, output, errors)."""
        out, err = self._folder / "out", self._folder / "err"
        with out.open("wb") as output, err.open("wb") as errors, open(os.devnull, "rb") as nothing:
            streams = (nothing.fileno(), output.fileno(), errors.fileno())
            program = self.start(code, args, env, streams=streams, whole_end=whole_end)
        try:
            program.wait(timeout_s)
        except BaseException as stopped:
            kill_group(program.pid)
            program.wait()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
        return program.wait(), out.read_text(), err.read_text()

    def stop(self) -> None:
        """End it; it has nothing to tidy up."""
        for other in (self._compiling, self._bare):
            if other is not None:
                other.stop()
        if self._process is not None and self._orders is not None:
            self._orders.close()
            self._process.kill()
            self._process.wait()

    def running(self, env: dict[str, str]) -> socket.socket:
        """Where it takes orders; it is started where it does not run yet."""
        if self._of is not None:
            return self._of.running(env)
        if self._orders is None:
            self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            unhooked = {k: v for k, v in env.items() if not k.startswith(("GEMMTUNED_", "AITER_"))}
            unhooked |= {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}  # whatever the first program asks for
            command = [sys.executable, "-P", str(HERE / "fork_server.py"), str(its.fileno()), *self._modules]
            self._process = subprocess.Popen(command, env=unhooked, cwd=HERE, pass_fds=(its.fileno(),))
            its.close()
        return self._orders
