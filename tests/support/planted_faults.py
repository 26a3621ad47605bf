"""The real search with faulty kernels among its candidates, for a real worker: `Worker(search="FILE:tune")`.

Every fault is planted behind a result that is right and in time, so that it is looked at as closely as any other.  An
illegal address breaks a CUDA context for good; here its kernel ends the process the way the worker does then.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment
from gemmtuned.daemon.child import measure, screening, search
from gemmtuned.daemon.child.worker_main import device_of
from gemmtuned.kernels import backends
from gemmtuned.kernels.backends.base import Kernel, StatelessKernel

sys.path.insert(0, str(Path(__file__).parent))  # loaded by path, in a worker
from planted_kernels import nan_result, now_and_then, right, writes_beside

BROKEN = 70  # worker_cuda.BROKEN


def hangs(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    time.sleep(3600)
    return right(a, b, bias)


def takes_all_memory(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    torch.empty(1 << 55, dtype=torch.uint8)
    return right(a, b, bias)


def illegal_address(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
    sys.stderr.flush()
    os._exit(BROKEN)


def host_out_of_memory(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
    return right(a, b, bias)


def writes_past_c(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return writes_beside(a, b, bias)


FAULTS: dict[str, Kernel | Callable[..., Tensor]] = {
    "planted-hang": hangs,
    "planted-memory": takes_all_memory,
    "planted-address": illegal_address,
    "planted-oom-kill": host_out_of_memory,
    "planted-beside": writes_past_c,
    "planted-49-of-50": now_and_then(),
    "planted-nan": nan_result,
}


SHORT = ("planted-memory", "planted-oom-kill")  # short of memory, which may be there another day


class _Planted:
    def __init__(self, name: str) -> None:
        self.name = name

    order = 90

    def stamps(self, device: Device) -> dict[str, str]:
        return {self.name: "1"}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        if problem.n == (40 if self.name in SHORT else 24):
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        kernel = FAULTS[self.name]
        return kernel if hasattr(kernel, "bind") else StatelessKernel(kernel)  # type: ignore[return-value,arg-type]


for _name in set(backends.BACKENDS) - {"torch"}:  # what is under test is how faults end, and not the search
    del backends.BACKENDS[_name]
for _name in FAULTS:
    backends.BACKENDS[_name] = _Planted(_name)
screening._HOPELESS = 0.0  # type: ignore[misc]  all are promising, however slow the fault makes them
screening.FINALISTS = 99  # type: ignore[misc]
measure.WallClock.waited_s = lambda self: None  # type: ignore[method-assign]  and the machine may be in use


def environment(device: str) -> Environment:
    return backends.environment(device_of(device))


def tune(*args: Any, **options: Any) -> Any:
    return search.tune_modes(*args, **options)
