"""The launches of a mixture's tiles, of moe_launch.py and moe_fp8_launch.py, loaded once a process."""

from __future__ import annotations

import threading

import torch

from gemmtuned.configs.errors import Declined
from gemmtuned.kernels.cuda.driver import OnDevice, RelaxedCapture
from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import moe_fp8_launch, moe_fp8_tiling, moe_launch, moe_tiling

Tile = moe_tiling.Tile | moe_fp8_tiling.Tile
Launches = moe_launch.Launches | moe_fp8_launch.Launches


def loaded(layer: Experts, up: Tile, down: Tile, device: int) -> Launches | None:
    """Made once a process and device; None where that has failed.

    up, down: both of one kind.  Raises Declined where it is not to be had now, for lack of memory say.
    """
    key = layer, up, down, device
    if key in _loaded:
        return _loaded[key]
    with _making:
        if key not in _loaded:
            try:
                with torch.cuda.device(device), OnDevice(device), RelaxedCapture():
                    _loaded[key] = _made(layer, up, down, cuda_device(device).arch)
            except Declined:
                raise
            except Exception:  # also of a Triton that is broken, or not the one that this is written for
                _loaded[key] = None
        return _loaded[key]


def _made(layer: Experts, up: Tile, down: Tile, arch: str) -> Launches:
    if isinstance(up, moe_fp8_tiling.Tile) and isinstance(down, moe_fp8_tiling.Tile):
        return moe_fp8_launch.Launches(layer, up, down, arch)
    assert isinstance(up, moe_tiling.Tile) and isinstance(down, moe_tiling.Tile)
    return moe_launch.Launches(layer, up, down, arch)


def likeliest(layer: Experts, tokens: int, device: int, *, quantised: bool) -> Launches | None:
    """What runs where nothing is tuned: the first tiles that compile for so many tokens; None where none do.

    quantised: X and H may be: tiles of e4m3 come first where the layer is one that they are written for.
    """
    arch = cuda_device(device).arch
    most = 1 << (tokens - 1).bit_length()  # so that a few of them serve all sizes
    for tiling in (moe_fp8_tiling, moe_tiling) if quantised else (moe_tiling,):
        if not tiling.runs_on(arch, layer):
            continue
        ups, downs = (tiling.likely(layer, most, arch, stage) for stage in (1, 2))
        made = (loaded(layer, up, down, device) for up, down in zip(ups, downs, strict=False))
        found = next((one for one in made if one is not None), None)
        if found is not None:
            return found
    return None


def refuse(launches: Launches) -> None:
    """They have failed, and are not given again in this process."""
    with _making:
        for key, made in _loaded.items():
            if made is launches:
                _loaded[key] = None


_loaded: dict[tuple[Experts, Tile, Tile, int], Launches | None] = {}
_making = threading.RLock()  # a handler of a signal may call in the middle
