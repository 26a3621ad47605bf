"""Run with TRITON_INTERPRET=1: every interpretable kernel on small shapes; one JSON line a case.

Triton's interpreter multiplies bf16 operands of a dot as if their bits were integers; `teach_bf16` mends that.
It also truncates where a device rounds, so bf16 results are allowed twice the error.
"""

import json
import sys

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from interpreted_dot_scaled import teach_dot_scaled
from quick_interpreter import make_quick

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.triton_ import Triton
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.triton import gemv, int_tiles, python_launch, tiles, warp_split_k

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
FP8 = {"dtype": "fp8_e4m3", "out_dtype": "bf16", "scale": "row"}


def teach_bf16() -> None:
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, d, precision, imprecise):
        return plain(self, widened(a), widened(b), d, precision, imprecise)

    interpreter.InterpreterBuilder.create_dot = create_dot


def case(module, m, n, k, config, *, bias=False, dtype=torch.float16, pad=0, launches=1):
    """Largest error over the result's RMS, and whether the counters are zero again.

    Rows of x and w lie `pad` elements further apart than K, and what lies between is NaN.
    """
    torch.manual_seed(3)
    x = torch.full((m, k + pad), float("nan"), dtype=dtype)
    w = torch.full((n, k + pad), float("nan"), dtype=dtype)
    x, w = x[:, :k], w[:, :k]
    x.copy_(torch.randn(m, k))
    w.copy_(torch.randn(n, k))
    x[:, -3:] *= 8  # a lost tail must show
    b = torch.randn(n).to(dtype) if bias else None
    want = x.double() @ w.double().t() + (b.double() if bias else 0)
    record = module.launch_record(config, python_launch.problem_of(x, w, b))
    space = python_launch.new_workspace(record, "cpu")
    for _ in range(launches):
        got = python_launch.run(module, x, w, b, config, space)
    clean = space is None or not space[: record.counters_bytes].any()
    error = ((got.double() - want).abs().max() / want.square().mean().sqrt()).item()
    return {"kernel": module.KERNEL.name, "shape": [m, n, k], "error": error, "clean": bool(clean), "dtype": str(dtype)}


def groups_case(kernel, batch, m, n, k, *, family="grouped", kind="randn", block_k=32, swap=1, **columns):
    """The same of groups or batches: the error of each result over its own size, or over the RMS of all if larger."""
    problem = Problem(family=family, batch=batch, m=m, n=n, k=k, **columns)
    config = {"rows": 16, "tokens": 16, "block_k": block_k, "warps": 4, "stages": 3, "swap": swap}
    family, cpu = family_of(problem), torch.device("cpu")
    inputs = family.make(problem, kind=kind, seed=3, device=cpu)
    want = family.reference(problem, inputs, family.sample(problem, seed=3, device=cpu))
    got = inputs.run(Triton(device=H200).prepare(Candidate.of("triton", kernel=kernel, **config), problem))
    error = ((got.double() - want).abs() / want.abs().clamp(min=want.square().mean().sqrt())).max().item()
    return {"kernel": kernel, "shape": [batch, m, n, k], "error": error, "clean": True, "dtype": str(got.dtype)}


def weights_case(m, n, k, weights, *, kind="apart", block_k=128, rows=32, split=1, **columns):
    """The same of a quantised weight, and no larger than torch's own error: X is fp16, whose arithmetic is numpy's."""
    wdtype, wscale, of = weights
    problem = Problem(
        family="weight_only", m=m, n=n, k=k, dtype="fp16", out_dtype="fp16", wdtype=wdtype, wscale=wscale,
        wscale_dtype=of, **columns,
    )  # fmt: skip
    config = {"rows": rows, "tokens": 16, "block_k": block_k, "split": split, "warps": 2, "stages": 3}
    family, cpu = family_of(problem), torch.device("cpu")
    inputs = family.make(problem, kind=kind, seed=3, device=cpu)
    want = family.reference(problem, inputs, family.sample(problem, seed=3, device=cpu))
    kernel = Triton(device=H200).prepare(Candidate.of("triton", kernel="weight_only_tiles", **config), problem)
    got, torchs = (
        ((y.double() - want).abs() / want.abs().clamp(min=want.square().mean().sqrt())).max().item()
        for y in (inputs.run(kernel), inputs.run(family.default(problem)))
    )
    shape = [m, n, k]
    clean = got <= max(torchs, 1e-3) and (kind != "integers" or got <= torchs)
    return {"kernel": "weight_only_tiles", "shape": shape, "error": got, "clean": clean, "dtype": "torch.float16"}


def ints_case(m, n, k, *, kind="largest", split=1, swap=0, block_k=32, pad=0):
    """How many sums of int8 are wrong in two launches on one workspace; pad: elements between rows."""
    problem = Problem(m=m, n=n, k=k, dtype="i8", out_dtype="i32")
    config = {"rows": 16, "tokens": 32, "block_k": block_k, "split": split, "swap": swap, "warps": 4, "stages": 3}
    record = int_tiles.launch_record(config, problem)
    launch = python_launch.launcher(int_tiles.KERNEL.function, record)
    space = python_launch.new_workspace(record, "cpu")
    wrong = 0
    for seed in (3, 4):
        inputs = family_of(problem).make(problem, kind=kind, seed=seed, device=torch.device("cpu"))
        x, w = (torch.full((len(t), k + pad), 127, dtype=torch.int8)[:, :k] for t in (inputs["x"], inputs["w"].mT))
        y = torch.full((m + 1, n), -1, dtype=torch.int32)
        launch({"x": x.copy_(inputs["x"]), "w": w.copy_(inputs["w"].mT), "y": y[:m]}, space)
        want = inputs["x"].long() @ inputs["w"].long()
        wrong += int((y[:m] != want).sum()) + int((y[m:] != -1).sum())
    clean = space is None or not space[: record.counters_bytes].any()
    return {"kernel": "int_tiles", "shape": [m, n, k], "error": wrong, "clean": bool(clean), "dtype": "torch.int32"}


def pairs_case(m, n, k, *, kind="apart", block_k=128, rows=32, split=1, decoded=0, **columns):
    """The same of MXFP4 by MXFP4, and no larger than torch's own error; one scale of each is NaN."""
    problem = Problem(
        family="scaled", m=m, n=n, k=k, dtype="fp4_e2m1", wdtype="fp4_e2m1", out_dtype="fp16", scale="1x32", **columns
    )
    config = {"rows": rows, "tokens": 16, "block_k": block_k, "split": split, "decoded": decoded}
    config |= {"warps": 2, "stages": 3}
    family, cpu = family_of(problem), torch.device("cpu")
    inputs = family.make(problem, kind=kind, seed=3, device=cpu)
    inputs["scale_w"][0, -1] = 255
    if m > 1:
        inputs["scale_x"][-1, -1] = 255
    want = family.reference(problem, inputs, family.sample(problem, seed=3, device=cpu))
    kernel = Triton(device=H200).prepare(Candidate.of("triton", kernel="mxfp4_tiles", **config), problem)
    got, torchs = inputs.run(kernel), inputs.run(family.default(problem))
    nan = want.isnan()
    size = want[~nan].square().mean().sqrt()
    of_got, of_torchs = (((y.double() - want).abs() / want.abs().clamp(min=size))[~nan].max().item()
                         for y in (got, torchs))  # fmt: skip
    right = torch.equal(got.isnan(), nan) and of_got <= max(of_torchs, 1e-3)
    clean = right and (kind != "integers" or of_got <= of_torchs)
    return {"kernel": "mxfp4_tiles", "shape": [m, n, k], "error": of_got, "clean": clean, "dtype": str(got.dtype)}


def gemv_config(rows=2, block_k=64, split=1, warps=4, unroll=1):
    return {"rows": rows, "block_k": block_k, "split": split, "warps": warps, "unroll": unroll}


def warp_config(rows=16, tokens=8, block_k=16, split=1, warps=2, stages=3):
    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "warps": warps}
    return {**config, "stages": stages}


def tiles_config(rows=16, tokens=16, block_k=16, split=1, group=1, swap=0, warps=4, stages=3):
    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "group": group, "swap": swap}
    return {**config, "warps": warps, "stages": stages}


def main() -> None:
    make_quick()
    teach_bf16()
    teach_dot_scaled()
    bf16 = torch.bfloat16
    cases = [
        lambda: case(gemv, 1, 8, 256, gemv_config()),
        lambda: case(gemv, 1, 7, 250, gemv_config(rows=4, unroll=2), bias=True, pad=6),
        lambda: case(gemv, 1, 9, 300, gemv_config(rows=4, split=3), bias=True, pad=4, launches=2),
        lambda: case(gemv, 1, 5, 70, gemv_config(rows=2, split=4), pad=2),  # slices without any K
        lambda: case(gemv, 1, 6, 128, gemv_config(rows=2, split=2), dtype=bf16),
        lambda: case(warp_split_k, 8, 32, 128, warp_config()),
        lambda: case(warp_split_k, 3, 40, 136, warp_config(), bias=True, pad=8),
        lambda: case(warp_split_k, 5, 23, 77, warp_config(split=3), bias=True, pad=3, launches=2),
        lambda: case(warp_split_k, 17, 33, 160, warp_config(tokens=32, rows=32, split=7, warps=4), pad=8),
        lambda: case(warp_split_k, 1, 16, 15, warp_config(split=2), pad=1),  # K smaller than one step
        lambda: case(warp_split_k, 8, 48, 128, warp_config(split=2), bias=True, dtype=bf16, launches=2),
        lambda: case(tiles, 16, 32, 64, tiles_config()),
        lambda: case(tiles, 33, 31, 72, tiles_config(group=2), bias=True, pad=8),
        lambda: case(tiles, 33, 49, 75, tiles_config(swap=1, rows=32, group=2, split=2), bias=True, pad=5, launches=2),
        lambda: case(tiles, 2, 17, 100, tiles_config(split=4), pad=4),
        lambda: case(tiles, 65, 20, 24, tiles_config(tokens=32, split=3, group=3), bias=True),  # more slices than K
        lambda: case(tiles, 16, 16, 64, tiles_config(split=2, swap=1), dtype=bf16, bias=True),
        lambda: groups_case("grouped", 5, 23, 24, 40, dtype="fp16"),
        lambda: groups_case("grouped", 9, 5, 40, 72, swap=0, dtype="fp16", layout="nn"),
        lambda: groups_case("scaled_grouped", 3, 63, 48, 80, kind="apart", **FP8),  # groups of several tiles, a K tail
        lambda: groups_case("batched", 3, 37, 40, 72, family="batched", dtype="fp16"),  # tails of all three
        lambda: groups_case("batched", 2, 5, 24, 64, family="batched", swap=0, dtype="fp16", layout="nn"),
        lambda: groups_case("batched", 1, 1, 16, 8, family="batched", block_k=16, dtype="bf16", layout="nn"),
        lambda: ints_case(17, 32, 128),
        lambda: ints_case(32, 40, 136, swap=1, pad=8),
        lambda: ints_case(17, 23, 77, split=3, pad=3, kind="randn"),
        lambda: ints_case(20, 24, 2048, split=4, swap=1, block_k=64),  # sums that fp32 does not hold
        lambda: ints_case(3, 16, 40, split=4),  # slices without any K
        lambda: weights_case(17, 40, 256, ("i8", "row", "fp32"), bias=True),
        lambda: weights_case(
            33, 150, 400, ("i8", "128x128", "fp32"), split=2
        ),  # K that ends within a step, and a block
        lambda: weights_case(16, 64, 384, ("fp8_e4m3", "tensor", "fp32"), rows=64, kind="integers"),
        lambda: weights_case(20, 136, 272, ("fp8_e4m3", "128x128", "fp32"), split=2, bias=True),
        lambda: weights_case(17, 40, 512, ("i4", "1x128", "fp16"), block_k=256, kind="integers"),
        lambda: weights_case(9, 33, 320, ("i4", "1x64", "fp32"), split=2, bias=True),
        lambda: weights_case(31, 72, 288, ("fp4_e2m1", "1x32", "e8m0"), split=3, kind="tail"),
        lambda: pairs_case(5, 40, 256, bias=True),
        lambda: pairs_case(17, 72, 416, split=2, kind="tail"),  # K that ends within a step
        lambda: pairs_case(33, 33, 1024, split=3, block_k=256, kind="integers"),
        lambda: pairs_case(1, 16, 32, split=2),  # a slice without any K
        lambda: pairs_case(5, 40, 256, decoded=1, bias=True),
        lambda: pairs_case(17, 72, 416, decoded=1, split=2, kind="tail"),
        lambda: pairs_case(33, 33, 1024, decoded=1, split=3, block_k=256, rows=64, kind="integers"),
        lambda: groups_case("scaled_grouped", 9, 5, 32, 64, kind="apart", swap=0, **FP8, math_mode="reduced"),
    ]
    for run in cases:
        sys.stdout.write(json.dumps(run()) + "\n")


if __name__ == "__main__":
    main()
