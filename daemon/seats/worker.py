"""The parent's half of a worker: a child process that measures, and that we can kill.

A kernel under test may hang, crash, break its device context or use up all memory.  Each of these ends the child and
costs one candidate; the daemon itself never touches a device.  The child lives for many problems (importing torch takes
seconds) and is niced.  It leads a process group of its own, so that its own children die with it.  It ends when the
daemon does: the operating system signals it, and its socket is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from gemmtuned.configs.errors import PieceFailed, WorkerDied, WorkerFailed, WorkerHung, WorkerKilled
from gemmtuned.configs.processes import is_stopped
from gemmtuned.configs.settings import unhooked_env
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.leftovers import alive_in_group, reap_orphans
from gemmtuned.daemon.process_output import cut, last_line, output_file, signal_name
from gemmtuned.daemon.protocol.wire import (
    COMPILING,
    MAY_COMPILE,
    Failed,
    Found,
    Hello,
    Inbox,
    Memory,
    Message,
    Order,
    Runs,
    Trial,
    encode,
)
from gemmtuned.daemon.seats.left_out import ALL, FROM_OUTSIDE, Pieces

TERM_GRACE_S: Final = 0.1  # a device must be free half a second after somebody else wants it
KILL_WAIT_S: Final = 0.5
FROZEN_S: Final = 2.0  # between two looks at it
_WAITING: Final = "waiting for work"
_OF_THIS_PROCESS: Final = Pieces()
_PAUSES_S: Final = (
    9.0  # beside a candidate's timeout: a search lets a device rest, and waits while it is slowed or in use
)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the worker may send no message.

    hello_s: at its start, for importing torch from a cold disk at nice 19, and again for each piece of other packages.
    prepare_s: after an order, for operands and their reference.  candidate_s: between the start of a candidate and its
    result.  compile_s: while a candidate is compiled ahead, which has a limit of its own (compile_ahead.py).
    may_compile_s: as candidate_s, of one whose library compiles at a first call.  other_s: between any two other
    messages.
    gflop_s: added to these for each GFLOP of the largest problem: four times what a core at 1 GFLOP/s needs.
    timeout_s: a candidate's limit as the user set it, in place of candidate_s and gflop_s.
    """

    hello_s: float = 180.0
    prepare_s: float = 120.0
    candidate_s: float = 120.0
    compile_s: float = 120.0
    may_compile_s: float = 600.0
    other_s: float = 120.0
    gflop_s: float = 4.0
    timeout_s: float | None = None


# A hanging kernel holds the GPU for all: whatever a candidate does there at 100 GFLOP/s is over in less
ON_GPU: Final = Deadlines(candidate_s=20.0, gflop_s=0.01)


class Tuner(Protocol):
    """What the service needs of a worker; `Worker` is the real one, tests have others."""

    pid: int
    environment: Environment | None
    memory_bytes: int | None  # that it holds on its device, as its last message said

    def tune(self, order: Order) -> None: ...
    def poll(self) -> list[Message]: ...
    def terminate(self) -> None: ...
    def stop(self) -> bool: ...
    def fileno(self) -> int: ...


class Worker:
    """One child process, which is started at once. Only the main thread may construct one.

    device: what it measures on, a `Monitor.id`.  nice: 19 gives way to everything; 0 when a person waits.
    memory_cap_bytes: how much of a GPU its tensors may always use beside a loaded program (more where much is free);
    None: all of it.  pieces: of other packages that it does without.  search: for tests, `FILE.py:function` in place of
    the real search; that file also defines the environment.  Raises WorkerFailed when no process can be started.
    """

    def __init__(
        self,
        device: str,
        *,
        nice: int = 19,
        memory_cap_bytes: int | None = None,
        pieces: Pieces = _OF_THIS_PROCESS,
        search: str = "",
        deadlines: Deadlines | None = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            # the child's PDEATHSIG fires when the thread that started it ends, not only at the end of the process
            raise WorkerFailed("a worker is started from the main thread only")
        self.environment: Environment | None = None
        self.memory_bytes: int | None = None
        self._deadlines = deadlines or (Deadlines() if device == "cpu" else ON_GPU)

        self._inbox = Inbox()
        self._order: Order | None = None
        self._device, self._pieces, self._ended = device, pieces, pieces.ended(device)
        self._running: Runs | None = None  # the piece of another package that it is at
        self._ran_pieces = False
        self._doing = "starting"
        self._told_to_end = self._killed = self._group_gone = self._asked_twice = False
        ours, theirs = socket.socketpair()
        self._output = output_file()
        command = [sys.executable, "-m", "gemmtuned.daemon.child.worker_main", str(theirs.fileno())]
        command += ["--parent", str(os.getpid()), "--device", device, "--nice", str(nice)]
        command += ["--without", json.dumps(pieces.without), "--ended", json.dumps(self._ended)]
        if memory_cap_bytes is not None:
            command += ["--memory-cap", str(memory_cap_bytes)]
        if search:
            command += ["--search", search]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the daemon alone, one kill the whole group
                cwd="/",  # `-m` puts the current folder before all others on the path
                env=unhooked_env(**_visible(device)),  # it sees its own GPU alone
            )
        except OSError as err:
            ours.close()
            raise WorkerFailed(f"cannot start {sys.executable}: {err.strerror or err}") from err
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._socket = ours
        self._polled_s = time.monotonic()
        self._until: float | None = self._polled_s + self._deadlines.hello_s

    def fileno(self) -> int:
        """Readable when `poll` has something to say."""
        return self._socket.fileno()

    def tune(self, order: Order) -> None:
        """Send an order; `poll` returns the answers. Raises WorkerDied when the child has ended."""
        self._order = order
        self._expect(self._deadlines.prepare_s, "preparing")
        try:
            self._socket.settimeout(2.0)
            self._socket.sendall(encode(order))
            self._socket.settimeout(None)  # with a timeout set, Python waits in spite of MSG_DONTWAIT
        except OSError as err:
            if not self._told_to_end:  # else it is no fault of the order
                raise self._post_mortem() from err

    def poll(self) -> list[Message]:
        """The messages that have come since the last call, without waiting.

        Raises WorkerDied or WorkerHung, but only after all earlier messages have been returned, so that no result is
        lost; not when the child ended on our order.  Raises PieceFailed where a piece of another package is to
        blame, and WorkerFailed for a message that makes no sense.  In all these cases the child has been ended.
        """
        cut(self._output)
        self._mind_gap()
        messages, closed = self._receive()
        for message in messages:
            self._note(message)
        if messages:
            return messages
        if closed or self._is_dead():
            if self._told_to_end:
                return []
            raise self._post_mortem()
        if self._until is not None and time.monotonic() > self._until:
            stopped = is_stopped(self.pid)
            self.stop()
            if stopped:
                raise WorkerKilled(f"worker was stopped from outside (SIGSTOP) past its deadline while {self._doing}")
            raise self._blamed(WorkerHung(f"no word past the deadline while {self._doing}"), "hung")
        return []

    def _mind_gap(self) -> None:
        """Give it the time for which we were not there ourselves: whoever freezes a container freezes it as well."""
        last_s, self._polled_s = self._polled_s, time.monotonic()
        if self._until is not None and self._polled_s - last_s > FROZEN_S:
            self._until += self._polled_s - last_s

    def terminate(self) -> None:
        """Tell the child to end, without waiting; call `stop` next."""
        self._told_to_end = True
        if self._process.returncode is None and not self._killed and not self._is_dead():
            self._signal_group(signal.SIGTERM)

    def stop(self) -> bool:
        """End the child and all that it started, by SIGTERM and then SIGKILL. False: it is stuck inside a driver."""
        with contextlib.suppress(OSError):
            self._socket.close()
        if self._process.returncode is None:
            if not self._is_dead() and not self._killed:
                self._signal_group(signal.SIGTERM)
                self._wait(TERM_GRACE_S)
            self._signal_group(signal.SIGKILL)  # even if the child has ended: what it started may live
            if not self._killed:  # on a second call a stuck child is not waited for again
                self._wait(KILL_WAIT_S)
            self._killed = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0)
        if self._process.returncode is None or not self._is_group_gone():
            return False
        if self._output is not None:
            self._output.close()
        return True

    def _receive(self) -> tuple[list[Message], bool]:
        messages: list[Message] = []
        try:
            while True:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
                if not data:
                    return messages, True
                messages += self._inbox.feed(data)
        except BlockingIOError:
            return messages, False
        except OSError:
            return messages, True
        except WorkerFailed:
            self.stop()
            raise

    def _note(self, message: Message) -> None:
        if isinstance(message, Hello):
            self.environment = message.environment
            self._pieces.at_start(self._device, well=True, with_pieces=ALL not in self._ended)
            self.memory_bytes = self.memory_bytes or 0
            self._until, self._doing = None, _WAITING
        elif isinstance(message, Memory):
            self.memory_bytes = message.bytes
        elif isinstance(message, Runs):
            self._running, self._ran_pieces = message if message.piece else None, True
            at = f"busy with {message.piece} (package {message.package})" if message.piece else ""
            if self.environment is None:
                self._expect(self._deadlines.hello_s, at or "starting")
            else:
                self._expect(self._deadlines.prepare_s, at or "preparing")
        elif isinstance(message, (Found, Failed)):
            self._order = None
            self._until, self._doing = None, _WAITING
        elif isinstance(message, Trial):
            if message.phase == "start" and message.note == COMPILING:
                self._expect(self._deadlines.compile_s, f"compiling {message.candidate} for {message.problem}")
            elif message.phase == "start":
                known = self._deadlines
                seconds = known.may_compile_s if message.note == MAY_COMPILE else known.candidate_s
                self._expect(seconds, f"trying {message.candidate} on {message.problem}")
                if self._deadlines.timeout_s is not None:
                    self._until = time.monotonic() + self._deadlines.timeout_s + _PAUSES_S
            else:
                self._expect(self._deadlines.other_s, f"done with the {message.phase} of {message.candidate}")

    def _expect(self, seconds: float, doing: str) -> None:
        largest = max((p.flops for p in self._order.members), default=0) if self._order else 0
        self._until = time.monotonic() + seconds + self._deadlines.gflop_s * largest / 1e9
        self._doing = doing

    def _is_dead(self) -> bool:
        """Whether the child has ended. It is not reaped here, so that nobody else can get its process group."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_dead() and time.monotonic() < until:
            time.sleep(0.002)

    def _is_group_gone(self) -> bool:
        """Whether all that the child started has ended, too: a compiler that was killed may hang at a disk."""
        if not self._group_gone:
            until = time.monotonic() + (0 if self._asked_twice else KILL_WAIT_S)
            self._asked_twice = True
            while not (gone := not alive_in_group(self.pid)) and time.monotonic() < until:
                time.sleep(0.005)
            self._group_gone = gone
            reap_orphans(self.pid)
        return self._group_gone

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _blamed(self, err: WorkerFailed, how: str) -> WorkerFailed:
        """The error, or a PieceFailed where a piece of another package ended the child."""
        at = self._running
        if at is None and self.environment is None and (self._ran_pieces or ALL in self._ended):
            self._pieces.at_start(self._device, well=False, with_pieces=self._ran_pieces)
        if at is None or at.piece in self._ended:
            return err
        self._pieces.blame(at.piece, at.package, how, doubtful=isinstance(err, WorkerHung | WorkerKilled))
        return PieceFailed(f"{err}. Workers do without it from now on")

    def _post_mortem(self) -> WorkerFailed:
        """Why the child ended, in words, with its last line of output."""
        self._wait(KILL_WAIT_S)  # the socket closes a moment before the process is dead
        ended_alone = self._is_dead()
        last = last_line(self._output)
        self.stop()
        code = self._process.returncode
        kind = WorkerDied
        if not ended_alone or code is None:
            why = "closed its socket and went on"
        elif code < 0:
            why = f"killed by {signal_name(-code)}"
            if code == -signal.SIGKILL:
                kind = WorkerKilled
                why += " (out of memory, or by somebody's hand)"
        else:
            why = f"ended with exit code {code}"
        words = f": {last}" if last else ""
        err = kind(f"worker {why} while {self._doing}{words}")
        from_outside = ended_alone and code is not None and -code in FROM_OUTSIDE
        return err if from_outside else self._blamed(err, f"{why}{words}")


def _visible(device: str) -> dict[str, str | None]:
    """Environment variables that make one device, and no other GPU, visible to torch."""
    kind, _, uuid = device.rpartition(":")
    if kind == "rocm":
        return {"ROCR_VISIBLE_DEVICES": uuid, "CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None}
    return {"CUDA_VISIBLE_DEVICES": uuid if device != "cpu" else "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
