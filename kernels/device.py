"""What the devices of this process are, as problems are keyed by them."""

from __future__ import annotations

from functools import cache

import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.solution import Device, cpu_device, slug


def device_at(place: str) -> Device:
    """The device at `cpu` or `cuda:<index>`. Raises CandidateFailed when there is none."""
    kind, _, index = place.partition(":")
    if kind == "cpu":
        return cpu_device()
    if kind == "cuda":
        return cuda_device(int(index or 0))
    raise CandidateFailed(f"{place!r} is no device we know, expected cpu or cuda:<index>")


def cuda_device(index: int) -> Device:
    """The CUDA (or ROCm) device of this index; initialises CUDA in this process."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise CandidateFailed(f"there is no device cuda:{index} in this process")
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = facts.gcnArchName.partition(":")[0]
        kind = "rocm"
    else:
        arch, kind = f"sm_{facts.major}{facts.minor}", "cuda"
    units = facts.multi_processor_count
    return Device(key=f"{kind}-{slug(facts.name, 40)}-{units}", kind=kind, name=facts.name, arch=arch, units=units)


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) of another device, and where there is none."""
    if index < 0 or torch.version.hip is not None or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(index)


def current_cuda_device() -> Device:
    """This process's current CUDA device. Raises CandidateFailed when it has none, or one that is not NVIDIA's."""
    device = cuda_device(torch.cuda.current_device()) if torch.cuda.is_available() else None
    if device is None or device.kind != "cuda":
        raise CandidateFailed("there is no CUDA device in this process")
    return device


def best_device() -> Device:
    """The first CUDA device of this machine, else its CPU; initialises CUDA in this process."""
    return device_at("cuda:0" if torch.cuda.is_available() else "cpu")
