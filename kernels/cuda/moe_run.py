"""The two launches of moe_decode as a function of tensors: compiled and loaded once, called from any thread and stream.

A call runs on the device of its operands and on the stream that is current there, whatever device is current, also in a
thread that has not used CUDA before.  The memory between the launches comes from torch's allocator at every call, so
each stream and CUDA graph has its own.
"""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs import clock
from gemmtuned.configs.errors import CandidateFailed, Declined
from gemmtuned.kernels.cuda import moe_decode, nvrtc
from gemmtuned.kernels.cuda.driver import Kernel, OnDevice, RelaxedCapture
from gemmtuned.kernels.cuda.moe_compile import compiled, stages_that_fit
from gemmtuned.kernels.cuda.moe_decode import Experts, Stage
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.mixture import How, Operands

ARGUMENTS: Final = ("x.ptr",) * 7 + ("x.size0",) * 2  # seven addresses and two numbers
ALIGNMENT: Final = 16  # bytes, of X, weights and scales of groups
LOOK_S: Final = 5.0  # between two looks for what nobody had compiled
_TYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_QUANTS: Final = {  # as moe_decode names them: weights, scales
    "tensor": ("fp8_e4m3", "tensor"), "row": ("fp8_e4m3", "row"), "128x128": ("fp8_e4m3", "128x128"),
    "mxfp4": ("mxfp4", "group"), "int4": ("int4", "group"),
}  # fmt: skip


def layer_of(o: Operands, how: How) -> Experts | None:
    """What the kernels are to be compiled for; None for operands that they do not take."""
    dtype = _TYPES.get(o.x.dtype, "")
    weight, scales = _QUANTS.get(how.quant, (dtype, "none"))
    interleaved = how.act == "swiglu"
    if not dtype or not how.gated or how.interleaved != interleaved or (o.bias1 is None) != (o.bias2 is None):
        return None
    if how.quant == "none" and {o.w1.dtype, o.w2.dtype} != {o.x.dtype}:
        return None
    if weight == "fp8_e4m3" and {o.w1.dtype, o.w2.dtype} != {torch.float8_e4m3fn}:
        return None
    width = o.x.shape[1]
    group = width // o.scale1.shape[-1] if scales == "group" and o.scale1 is not None else 0
    if scales == "group" and (o.scale2 is None or o.scale2.shape[-1] * group != o.w2.shape[2] * 2):
        return None
    layer = Experts(
        width=width, inter=o.w1.shape[1] // 2, experts=len(o.w1), topk=o.ids.shape[1], dtype=dtype, weight=weight,
        scales=scales, group=group, act="swiglu_clamped" if interleaved else how.act, bias=o.bias1 is not None,
        weight_first=how.weighted, long_ids=o.ids.dtype == torch.int64,
    )  # fmt: skip
    try:
        layer.check()
    except CandidateFailed:
        return None
    return layer if _lies_well(o, scales, weight) else None


def _lies_well(o: Operands, scales: str, weight: str) -> bool:
    whole = (o.w1, o.w2, o.scale1, o.scale2, o.bias1, o.bias2)
    if any(t is not None and not t.is_contiguous() for t in whole):
        return False
    read_in_words = (o.scale1, o.scale2) if scales == "group" else ()
    if any(t is not None and t.data_ptr() % ALIGNMENT for t in (o.x, o.w1, o.w2, *read_in_words)):
        return False
    wanted = {"none": None, "group": torch.uint8 if weight == "mxfp4" else o.x.dtype}.get(scales, torch.float32)
    if wanted is not None and any(s is None or s.dtype != wanted for s in (o.scale1, o.scale2)):
        return False
    return all(b is None or b.dtype == o.x.dtype for b in (o.bias1, o.bias2))


def runs_here(device: torch.device) -> bool:
    """Whether this is a GPU that the kernels are written for, and a compiler is there."""
    if device.type != "cuda" or torch.version.hip is not None or nvrtc.version() is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


class Launches:
    """Both launches of a layer for up to `most` tokens, loaded on the current device.

    Raises CandidateFailed where one does not compile, or keeps values of a thread in memory.  kept: as for compiled.
    """

    def __init__(self, layer: Experts, most: int, up: Stage, down: Stage, *, kept: bool = False) -> None:
        self.layer, self._how = layer, (up, down)
        self._lock = threading.Lock()  # a launch is prepared in memory of the kernel's
        self._units = cuda_device(torch.cuda.current_device()).units
        self._kernels = []
        for stage, how in enumerate((up, down), 1):
            made, called = compiled(layer, stage, how, most, kept=kept)
            shared = moe_decode.shared_bytes(layer, stage, how, most * layer.topk)
            threads, cluster = 32 * how.warps, moe_decode.cluster(stage, how)
            self._kernels.append(
                Kernel(made.data, called, threads=threads, shared=shared, cluster=cluster, early=stage == 2)
            )

    def __call__(self, o: Operands) -> Tensor:
        """Y [T, D]; the operands are those that layer_of took, on the device that this was loaded on.

        Raises CandidateFailed when the driver refuses, Declined when that says nothing about the kernels.
        """
        device = o.x.get_device()
        with torch.cuda.device(device), OnDevice(device):
            return self._run(o)

    def _run(self, o: Operands) -> Tensor:
        layer, tokens = self.layer, len(o.x)
        x, ids, weights = o.x.contiguous(), o.ids.contiguous(), o.weights.contiguous()
        h = torch.empty(tokens * layer.topk, layer.inter, dtype=x.dtype, device=x.device)
        y = torch.empty_like(x)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        calls = ((x, o.w1, o.scale1, o.bias1, h), (h, o.w2, o.scale2, o.bias2, y))
        with self._lock:
            for stage, (given, w, scale, bias, to) in enumerate(calls):
                tensors = (given, ids, weights, w, scale, bias, to)
                pointers = [0 if t is None else t.data_ptr() for t in tensors]
                grid = moe_decode.grid(layer, stage + 1, self._how[stage], tokens, self._units)
                self._kernels[stage](stream, ARGUMENTS, (*pointers, tokens * layer.topk, layer.width), (*grid, 1))
        return y


def loaded(
    layer: Experts, most: int, stages: tuple[Stage, Stage] | None, device: int, *, kept: bool = False
) -> Launches | None:  # fmt: skip
    """Made once a process and device; None where nothing fits, or where these have failed.

    Without stages: the likeliest ones that fit.  kept: nothing is compiled, None until somebody else has done it.
    Raises Declined where it is not to be had now, for lack of memory say.
    """
    key = layer, most, stages, device
    if key not in _loaded:
        if kept and _look_at_s.get(key, 0.0) > clock.monotonic():
            return None
        with _making:
            try:
                if key not in _loaded:
                    _loaded[key] = _made(layer, most, stages, device, kept)
            except Declined:
                if not kept:
                    raise
                _look_at_s[key] = clock.monotonic() + LOOK_S
                return None
    return _loaded[key]


def refuse(launches: Launches) -> None:
    """They have failed, and are not given again in this process."""
    with _making:
        for key, made in _loaded.items():
            if made is launches:
                _loaded[key] = None


def _made(
    layer: Experts, most: int, stages: tuple[Stage, Stage] | None, device: int, kept: bool
) -> Launches | None:  # fmt: skip
    try:
        with torch.cuda.device(device), OnDevice(device), RelaxedCapture():
            up, down = stages or (_likeliest(layer, 1, most, kept), _likeliest(layer, 2, most, kept))
            return Launches(layer, most, up, down, kept=kept)
    except Declined:
        raise
    except CandidateFailed:
        return None


def _likeliest(layer: Experts, stage: int, most: int, kept: bool) -> Stage:
    """The first fitting configuration that compiles. Raises CandidateFailed where none does."""
    for how in stages_that_fit(layer, stage, most):
        try:
            compiled(layer, stage, how, most, kept=kept)
        except Declined:
            raise
        except CandidateFailed:
            continue
        return how
    raise CandidateFailed(f"no configuration of launch {stage} fits {layer} for {most} tokens")


_loaded: dict[tuple[Experts, int, tuple[Stage, Stage] | None, int], Launches | None] = {}
_look_at_s: dict[tuple[Experts, int, tuple[Stage, Stage] | None, int], float] = {}
_making = threading.RLock()  # a handler of a signal may call in the middle
