"""The real search with operators that compile at their first call and cannot: `Worker(search="FILE:tune")`.

PLANTED_LACKS names a folder: while a file of an operator's name lies in it, what the operator needs is not there.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.child import measure, screening, search
from gemmtuned.daemon.child.worker_main import device_of
from gemmtuned.kernels import backends
from gemmtuned.kernels.backends.torch_op import OperatorBackend

SOUND_N = 32  # problems of this N have none of these candidates


def full_disk() -> None:
    with open("/dev/full", "w") as cache:
        cache.write("a binary")


def no_compiler() -> None:
    try:
        subprocess.run(["/nowhere/nvcc", "--version"], check=True)
    except OSError as err:
        raise RuntimeError("Error checking compiler version for /nowhere/nvcc") from err


def compiler_killed() -> None:
    try:
        subprocess.run(["/bin/sh", "-c", "kill -9 $$"], check=True)
    except subprocess.CalledProcessError as err:
        raise RuntimeError("Error building extension 'fused'") from err


def assembler_on_a_full_disk() -> None:
    raise RuntimeError(
        "Error building extension 'fused': [1/2] c++ -O3\n/tmp/cc.s: fatal error: No space left on device"
    )


def no_memory() -> None:
    torch.empty(1 << 55, dtype=torch.uint8)


def worker_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out


LACKS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (full_disk, no_compiler, compiler_killed, assembler_on_a_full_disk, no_memory, worker_killed)
}
_here = Path(os.environ["PLANTED_LACKS"])
_library = torch.library.Library("planted_passing", "DEF")


def _plant(name: str, lack: Callable[[], None]) -> None:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        if (_here / name).exists():
            lack()
        return torch.mm(x, w.t())

    _library.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    _library.impl(name, linear, "CPU")
    backends.BACKENDS[name] = OperatorBackend(
        name=name, package="torch", operator=f"planted_passing::{name}", arguments=("x", "w"), kinds=("cpu",),
        suits=lambda p: p.n != SOUND_N and not p.bias and p.family == "dense", order=90,
    )  # fmt: skip


for _name in set(backends.BACKENDS) - {"torch"}:
    del backends.BACKENDS[_name]
for _name, _lack in LACKS.items():
    _plant(_name, _lack)
screening._HOPELESS = 0.0  # type: ignore[misc]
screening.FINALISTS = 99  # type: ignore[misc]
measure.WallClock.waited_s = lambda self: None  # type: ignore[method-assign]


def environment(device: str) -> Environment:
    return backends.environment(device_of(device))


def tune(*args: Any, **options: Any) -> Any:
    return search.tune_modes(*args, **options)
