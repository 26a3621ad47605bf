"""Which clock times a kind of device."""

from __future__ import annotations

import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.daemon.child.measure import Clock, WallClock
from gemmtuned.daemon.child.measure_cuda import GraphClock, cuda_graphs


def clock_for(device: torch.device) -> Clock:
    """The clock for a kind of device. Raises CandidateFailed where there is none yet."""
    if device.type == "cpu":
        return WallClock()
    if device.type != "cuda":
        raise CandidateFailed(f"timing on {device.type} is not supported yet")
    return GraphClock(cuda_graphs())
