"""Operands and launches of our kernels for scaled problems, on the CPU, as PTX."""

from __future__ import annotations

from typing import Any

import ptx_cuda
import torch

from gemmtuned.configs.launch_values import arguments_of, grid_of, holds
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.cuda.kernel import CudaKernel
from gemmtuned.kernels.shuffled_order import in_order

OUT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def whole_numbers(rows: int, columns: int, *, apart: int, seed: int, int8: bool = False) -> torch.Tensor:
    """[rows, columns] of e4m3 whose products have exact sums in fp32; NaN between rows, no memory past the last.

    int8: of all its values, -128 and 127 among them, and 127 between rows.
    """
    ld = columns + apart
    if int8:
        flat = torch.full(((rows - 1) * ld + columns,), 127, dtype=torch.int8)
        drawn = torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))
        flat.as_strided((rows, columns), (ld, 1)).copy_(drawn)
        return flat.as_strided((rows, columns), (ld, 1))
    flat = torch.full(((rows - 1) * ld + columns,), float("nan")).to(torch.float8_e4m3fn)
    values = torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    flat.as_strided((rows, columns), (ld, 1)).copy_(values.to(torch.float8_e4m3fn))
    return flat.as_strided((rows, columns), (ld, 1))


def every_code(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [m, k], of a single 1 in each row; w [n, k] of all codes of e4m3 but NaN): each code by itself is a result."""
    good = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    at = torch.arange(m) * (k // m)
    x = torch.zeros(m, k)
    x[torch.arange(m), at] = 1
    codes = (torch.arange(n)[:, None] + 61 * torch.arange(k)) % len(good)
    assert codes[:, at].unique().numel() == len(good), "too few results for every code"
    return x.to(torch.float8_e4m3fn), good[codes].view(torch.float8_e4m3fn)


def nearly_opposite(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [m, k], w [n, k]) whose sums are small and whose parts are large: those of another order are other numbers."""
    drawn = torch.Generator().manual_seed(7)
    x, w = (torch.randn(rows, k, generator=drawn).mul(200).clamp(-448, 448) for rows in (m, n))
    half = k // 2
    x[:, half : 2 * half], w[:, half : 2 * half] = x[:, :half], -w[:, :half]
    w[:, ::8] = torch.randn(n, len(range(0, k, 8)), generator=drawn) / 256
    return x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)


def powers(*shape: int, seed: int) -> torch.Tensor:
    """Scales by which whole numbers stay exact, neighbours far apart, some negative."""
    found = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return torch.exp2(found.float()) * torch.where(found % 3 == 0, -1.0, 1.0)


def scales(one: Any) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor, torch.Tensor]:
    """(sx and sw as they lie in memory, ldsx, ldsw, the factor of each value of X, of W)."""
    if one.kind == "TENSOR":
        sx, sw = powers(1, seed=4), powers(1, seed=5)
        return sx, sw, 0, 0, sx.double(), sw.double()
    if one.kind == "W_ROW":
        sx, sw = powers(1, seed=4), powers(one.n, seed=5)
        return sx, sw, 0, 0, sx.double(), sw.double()[:, None]
    if one.kind == "ROW":
        sx, sw = powers(one.m, seed=4), powers(one.n, seed=5)
        return sx, sw, 0, 0, sx.double()[:, None], sw.double()[:, None]
    steps, across = -(-one.k // 128), -(-one.n // 128)
    ldsx, ldsw = (steps if one.by_token else one.m) + 3, steps + 1
    sx = torch.full(((one.m if one.by_token else steps) * ldsx - 3,), torch.nan)
    sw = torch.full((across * ldsw - 1,), torch.nan)
    of_x, of_w = as_given(one, sx, sw, ldsx, ldsw).values()
    of_x.copy_(powers(one.m, steps, seed=4))
    of_w.copy_(powers(across, steps, seed=5))
    x = of_x.double().repeat_interleave(128, 1)[:, : one.k]
    w = of_w.double().repeat_interleave(128, 0)[: one.n].repeat_interleave(128, 1)[:, : one.k]
    return sx, sw, ldsx, ldsw, x, w


def zero_points(one: Any, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Zero points of X, up to the ends of int8, and sums of W's rows, which are multiplied with it where it is one."""
    if not one.zero:
        return {}
    drawn = torch.randint(-128, 128, (one.m,), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
    drawn[0] = -128
    sums = w.sum(1, dtype=torch.int32)
    return {"sums_w": sums * drawn[0]} if one.zero == 1 else {"zero_x": drawn, "sums_w": sums}


def as_given(one: Any, sx: torch.Tensor, sw: torch.Tensor, ldsx: int, ldsw: int) -> dict[str, torch.Tensor]:
    """The scales as a launch record names them: a row for each row, or block of rows, of X and W."""
    if one.kind == "TENSOR":
        return {"scale_x": sx, "scale_w": sw}
    if one.kind == "W_ROW":
        return {"scale_x": sx, "scale_w": sw[:, None]}
    if one.kind == "ROW":
        return {"scale_x": sx[:, None], "scale_w": sw[:, None]}
    steps, across = -(-one.k // 128), -(-one.n // 128)
    apart = (ldsx, 1) if one.by_token else (1, ldsx)
    return {"scale_x": sx.as_strided((one.m, steps), apart), "scale_w": sw.as_strided((across, steps), (ldsw, 1))}


def run(
    one: Any, kernel: CudaKernel, *, change: tuple[str, str] = ("", ""), huge: bool = False, codes: bool = False,
    rounded: bool = False, y_at: int = 0, **turns: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(Y, what it should be) of a configuration of this kernel; change: of its source.

    huge: of int8, sums of each half of K are too large for fp32, but not both together.  codes: see every_code.
    rounded: see nearly_opposite.  y_at: values before Y in memory that is aligned.
    """
    int8 = getattr(one, "int8", False)
    x = whole_numbers(one.m, one.k, apart=16, seed=1, int8=int8)
    w = whole_numbers(one.n, one.k, apart=32, seed=2, int8=int8)
    if huge:
        x[:], w[:, : one.k // 2], w[:, one.k // 2 :] = 127, 127, -127
        w[:, 1] -= torch.arange(one.n).remainder(5)  # by 127 times this much
    if codes:
        for to, drawn in zip((x, w), every_code(one.m, one.n, one.k), strict=True):
            to.copy_(drawn)
    if rounded:
        for to, drawn in zip((x, w), nearly_opposite(one.m, one.n, one.k), strict=True):
            to.copy_(drawn)
    sx, sw, ldsx, ldsw, of_x, of_w = scales(one)
    bias = torch.arange(one.n).remainder(7).to(OUT[one.out])
    y = torch.full((y_at + one.m * one.n,), torch.nan, dtype=OUT[one.out])[y_at:].view(one.m, one.n)
    zero = zero_points(one, w) if int8 else {}
    if int8:  # each step rounds to fp32 as the kernel does
        whole = x.long() @ w.long().T
        if zero:
            whole = whole - zero.get("zero_x", torch.ones(one.m, dtype=torch.int32)).long()[:, None] * zero["sums_w"]
        assert whole.abs().max() < 1 << 31
        sums = whole.float() * of_w.float().reshape(1, -1) * of_x.float().reshape(-1, 1)
        exact = sums + (bias.float() if one.bias else 0)
    else:
        exact = (x.double() * of_x) @ (w.double() * of_w).T + (bias.double() if one.bias else 0)
    in_memory = in_order(w).view(w.shape) if getattr(one, "shuffled", False) else w
    operands = {"x": x, "w": in_memory, "bias": bias, "y": y, **zero, **as_given(one, sx, sw, ldsx, ldsw)}
    launch, memory = one.launch, {id(operands["scale_x"]): sx, id(operands["scale_w"]): sw}
    assert holds(launch.checked, operands)
    across, down, deep = grid_of(launch.grid, operands)
    assert deep == 1
    room = torch.full((launch.workspace_bytes - launch.partials_offset,), 0xFF, dtype=torch.uint8)
    values = arguments_of(launch, operands, partials=room, pointer=lambda t: memory.get(id(t), t))
    source = one.source()
    assert change[0] in source

    how = ptx_cuda.Launch((across * launch.cluster, down), launch.threads, launch.shared, launch.cluster)
    text = ptx_cuda.compiled(source.replace(*change), kernel.target)
    ptx_cuda.run(text, how, values, **turns)

    return y, exact.to(OUT[one.out])


def problem(m: int, n: int, k: int, **columns: Any) -> Problem:
    values = {"dtype": "fp8_e4m3", "out_dtype": "bf16", "scale": "row", "math_mode": "reduced", **columns}
    return Problem(family="scaled", m=m, n=n, k=k, **values)
