"""Operands of weight-only products on the CPU, and a launch of our kernel on them, as PTX."""

from __future__ import annotations

from typing import Any

import ptx_code
import ptx_cuda
import torch
from ptx_warps import Warps

from gemmtuned.configs.launch_values import arguments_of, grid_of, holds
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.cuda.weight_only import KERNEL, WeightOnly

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def apart(values: torch.Tensor, more: int, filler: float) -> torch.Tensor:
    """The same rows with room between them, and no memory past the last."""
    rows, columns = values.shape
    ld = columns + more
    flat = torch.full(((rows - 1) * ld + columns,), filler).to(values.dtype)
    view = flat.as_strided((rows, columns), (ld, 1))
    view.copy_(values)
    return view


def powers(*shape: int, seed: int, most: int = 3) -> torch.Tensor:
    """Scales by which whole numbers stay exact, neighbours far apart."""
    return torch.exp2(torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).double())


def weights(one: WeightOnly, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(W as it lies in memory, its scales [rows, columns], the values in fp64)."""
    random = torch.Generator().manual_seed(seed)
    n, k = one.n, one.k
    if one.weight in ("i4", "fp4_e2m1"):
        codes = torch.randint(0, 16, (n, k), generator=random)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        s = powers(n, k // one.group, seed=seed + 1)
        values = (codes - 8).double()
        if one.weight == "fp4_e2m1":
            values = E2M1[codes & 7].double() * torch.where(codes > 7, -1.0, 1.0)
        scales = (torch.log2(s) + 127).to(torch.uint8) if one.scale_type == "e8m0" else s.to(TYPES[one.scale_type])
        return apart(packed, 32, 0x77), scales, values * s.repeat_interleave(one.group, 1)
    if one.weight == "i8":
        w = torch.randint(-128, 128, (n, k), generator=random).to(torch.int8)
    else:
        w = torch.randint(-3, 4, (n, k), generator=random).float().to(torch.float8_e4m3fn)
    rows, columns = {"tensor": (1, 1), "row": (n, 1)}.get(one.scales, (-(-n // 128), -(-k // 128)))
    s = powers(rows, columns, seed=seed + 1)
    spread = s
    if one.scales == "128x128":
        spread = s.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return apart(w, 16, 127 if one.weight == "i8" else torch.nan), s.float(), w.double() * spread


def run(one: WeightOnly, *, change: tuple[str, str] = ("", ""), **turns: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y, what it should be) of a configuration; change: of its source."""
    random = torch.Generator().manual_seed(1)
    dtype = TYPES[one.dtype]
    x = apart(torch.randint(-2, 3, (one.m, one.k), generator=random).to(dtype), 8, torch.nan)
    w, scales, exact_w = weights(one)
    bias = torch.arange(one.n).remainder(7).to(dtype)
    y = torch.full((one.m, one.n), torch.nan, dtype=dtype)
    operands = {"x": x, "w": w, "bias": bias, "y": y, "scale_w": scales}
    launched(one, operands, change=change, **turns)
    return y, (x.double() @ exact_w.T + (bias.double() if one.bias else 0)).to(dtype)


def launched(
    one: WeightOnly, operands: dict[str, torch.Tensor], *, change: tuple[str, str] = ("", ""), **turns: Any
) -> None:
    """One launch by its record."""
    launch = one.launch
    assert holds(launch.checked, operands)
    programs = grid_of(launch.grid, operands)
    assert (programs[0] * launch.cluster, *programs[1:]) == (*one.grid, 1)
    values = arguments_of(launch, operands, pointer=lambda t: t)
    source = one.source()
    assert change[0] in source
    how = ptx_cuda.Launch(one.grid, ptx_code.WARP * one.warps, one.shared, one.parts)
    ptx_cuda.run(ptx_cuda.compiled(source.replace(*change), KERNEL.target), how, values, kind=Warps, **turns)


def problem(m: int, n: int, k: int, **columns: Any) -> Problem:
    values = {"dtype": "bf16", "wdtype": "i4", "wscale": "1x128", "wscale_dtype": "bf16", **columns}
    return Problem(family="weight_only", m=m, n=n, k=k, **values)
