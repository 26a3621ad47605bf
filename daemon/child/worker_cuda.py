"""CHILD side, on GPUs: our memory is reported as it changes, and kept under a cap; is the device still well?

The parent cannot tell our memory from others' where the driver hides processes, so we say what is ours.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Final

import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.daemon.protocol.wire import Memory, encode

LOOK_S: Final = 0.05
STAND_STILL_S: Final = 1.0  # the driver's answer may be as old (sampler.py)
WORTH_SAYING_BYTES: Final = 16 << 20
MOST_BYTES: Final = 16 << 30
BROKEN: Final = 70  # exit code: the device context is broken, whatever runs next would fail, too


class Speaker:
    """The worker's socket, for two threads: the search, and one that tells the memory we hold."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._reported: int | None = None

    def start(self) -> None:
        """Tell from now on; first do nothing, so that at our first word the driver's count has all of our context."""
        time.sleep(STAND_STILL_S)
        self.tell()
        threading.Thread(target=self._watch, name="gemmtuned-memory", daemon=True).start()

    def sendall(self, data: bytes) -> None:
        """As socket.sendall."""
        with self._lock:
            self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        """As socket.recv."""
        return self._socket.recv(size)

    def tell(self) -> None:
        """Say how much our tensors hold, if that is news."""
        held = torch.cuda.memory_reserved()
        if self._reported is None or abs(held - self._reported) >= WORTH_SAYING_BYTES:
            self._reported = held
            self.sendall(encode(Memory(held)))

    def _watch(self) -> None:
        try:
            while True:
                time.sleep(LOOK_S)
                self.tell()
        except (OSError, RuntimeError):  # the parent is gone, or the context is: the search will find out
            pass


def cap_memory(least_bytes: int) -> None:
    """Have torch refuse to hold more of the device than allowed_bytes from now on, context not counted. 0: no cap."""
    if least_bytes:
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(allowed_bytes(free, least_bytes) / total, 1.0))


def allowed_bytes(free: int, least: int) -> int:
    """What tensors may take beside a loaded program: `least`, or an eighth of what is free, up to MOST_BYTES.

    The inputs of a language model's last layer, with what they are checked against, take several GiB; the program
    that we are a guest of may want to grow.
    """
    return max(least, min(free // 8, MOST_BYTES))


def check_device() -> None:
    """A product whose result is known. Raises CandidateFailed: the device is not well, nothing may be tuned on it."""
    ones = torch.ones(256, 256, device="cuda")
    if not bool(torch.all(ones @ ones == 256.0)):  # exact in every precision
        raise CandidateFailed("the device gives a wrong result for a product of ones: it needs an operator")


def recover() -> None:
    """After a failure: give back memory that it took; end the process when it left the device context unusable.

    So does an illegal address, or a launch that failed.  The parent then blames the candidate that was at work and goes
    on with a new worker.
    """
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as err:
        sys.stderr.write(f"{str(err).splitlines()[0]}\n")
        sys.stderr.flush()
        os._exit(BROKEN)
