"""Every backend, family and kernel of ours keeps the contract that others' must (gemmtuned.testing)."""

from __future__ import annotations

from typing import Any

import pytest
from cases import reads_beyond_rows

from gemmtuned.configs.problem import CHAIN_M, Problem
from gemmtuned.configs.solution import Device, cpu_device
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import FAMILIES
from gemmtuned.testing import BackendContract, FamilyContract, KernelContract

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)


def problems(*texts: str) -> tuple[Problem, ...]:
    return tuple(map(Problem.parse, texts))


LINEAR = problems("fp32:3x40x72,threads=1", "bf16:5x24x136+bias,threads=1")
INTEGERS = problems("i8>i32:3x40x72,threads=1", "i8>i32:17x24x136,layout=nn,threads=1")
MIXTURES = problems(
    "moe:fp32:3x64x64+bias,threads=1,experts=6,topk=2,inter=40,act=gelu",
    "moe:bf16/i4:3x128x128,wscale=1x64,wscaledtype=bf16,threads=1,experts=6,topk=2,inter=64,act=silu_gated",
    "moe:fp16/fp4_e2m1:2x64x64+bias,wscale=1x32,threads=1,experts=4,topk=1,inter=96,act=swiglu_gated_interleaved",
    "moe:bf16/fp8_e4m3:5x144x144,wscale=128x128,threads=1,experts=4,topk=2,inter=144,act=silu_gated_weighted",
    "moe:fp16/fp8_e4m3:4x64x64,wscale=tensor,threads=1,experts=4,topk=2,inter=32,act=gelu_gated",
    "moe:bf16/i8:4x64x64,wscale=row,threads=1,experts=4,topk=2,inter=32,act=silu",
)
OF_BACKEND = {  # on a CPU; those of GPUs are run by tests/gpu
    "torch": LINEAR + INTEGERS + problems("batched:fp32:2x3x8x16,layout=nn,threads=1"),
    "torch_swap": (LINEAR[:1] if reads_beyond_rows() else LINEAR) + INTEGERS,
    "torch_mv": problems("fp32:1x40x72,threads=1"),
    "onednn": problems("fp32:3x40x72,threads=1"),
    "onednn_packed": problems("fp32:3x40x72,weight=packed,threads=1"),
    "rows": problems(f"fp32:{CHAIN_M}x40x72,invariant=1,threads=1"),
    "moe_grouped": MIXTURES,
}
OF_FAMILY = {
    "dense": LINEAR + problems("fp16:9x16x64,layout=tn"),
    "dense_add": problems("dense_add:fp32:3x40x72"),
    "batched": problems("batched:fp32:2x3x8x16,layout=nn"),
    "batched_add": problems("batched_add:fp32:2x3x8x16,layout=nn"),
    "weight_only": problems(
        "weight_only:bf16/i4:3x40x256,wscale=1x32,wscaledtype=bf16,threads=1",
        "weight_only:fp16/fp4_e2m1:9x24x256+bias,wscale=1x32,threads=1",
        "weight_only:bf16/fp8_e4m3:5x136x272,wscale=128x128,threads=1",
        "weight_only:fp16/i8:1x40x144,wscale=row,threads=1",
    ),
    "moe": MIXTURES,
}
OF_KERNEL = {
    "gemv": problems("bf16:1x576x7168", "fp16:1x1000x1032+bias"),
    "fragments": problems("bf16:4x576x7168", "fp16:8x1000x1032+bias"),
    "selected": problems("bf16:16x576x7168", "fp16:12x1000x1032+bias"),
    "warp_split_k": problems("bf16:8x576x7168", "fp16:32x1000x1032+bias"),
    "tiles": problems("bf16:64x576x7168", "fp16:200x1000x1032+bias"),
    "int_tiles": problems("i8>i32:17x576x7168", "i8>i32:64x1000x1032"),
    "batched": problems("batched:bf16:16x8x512x128", "batched:fp16:5x300x136x520,layout=nn"),
    "grouped": problems("grouped:bf16:8x64x576x1024", "grouped:fp16:5x23x1000x1032,layout=nn"),
    "scaled_grouped": problems(
        "grouped:fp8_e4m3>bf16:8x64x576x1024,scale=row", "grouped:fp8_e4m3>bf16:5x230x1008x1040,scale=row,math=reduced"
    ),
    "one_shot": problems("bf16:64x576x7168", "fp16:16x1536x1024+bias"),
    "scaled_one_shot": problems(
        "scaled:fp8_e4m3>bf16:16x576x1024,scale=row",
        "scaled:fp8_e4m3>bf16:64x512x2048+bias,scale=tensor",
        "scaled:i8>bf16:33x576x1024+bias,scale=row+zero",
        "scaled:i8>fp16:17x512x2048,scale=tensor+zero",
    ),
    "scaled_tiles": problems(
        "scaled:fp8_e4m3>bf16:64x576x1024,scale=row",
        "scaled:fp8_e4m3>fp16:1000x512x2048+bias,scale=1x128,scalelayout=col",
        "scaled:i8>bf16:256x4096x1040+bias,scale=row+zero",
        "scaled:i8>fp16:33x512x2048,scale=tensor+zero,wscale=row",
    ),
    "scaled_fragments": problems(
        "scaled:fp8_e4m3>bf16:1x576x1024,scale=row",
        "scaled:fp8_e4m3>bf16:9x512x2048+bias,scale=tensor",
        "scaled:i8>bf16:2x576x1024,scale=row",
        "scaled:i8>bf16:16x576x1024+bias,scale=row+zero",
        "scaled:i8>fp16:3x512x2048,scale=tensor+zero,wscale=row",
    ),
    "weight_only": problems(
        "weight_only:bf16/i4:1x576x1024,wscale=1x128,wscaledtype=bf16",
        "weight_only:fp16/fp4_e2m1:16x512x2048+bias,wscale=1x32",
        "weight_only:bf16/i8:2x576x1024,wscale=row",
    ),
    "weight_only_tiles": problems(
        "weight_only:bf16/i4:64x576x1024,wscale=1x128,wscaledtype=bf16",
        "weight_only:fp16/fp4_e2m1:17x512x2048+bias,wscale=1x32",
        "weight_only:bf16/i8:300x576x1024,wscale=row",
        "weight_only:bf16/fp8_e4m3:33x576x1024,wscale=128x128",
    ),
    "mxfp4_tiles": problems(
        "scaled:fp4_e2m1>bf16:16x576x1024,scale=1x32", "scaled:fp4_e2m1>fp16:300x1000x1056+bias,scale=1x32"
    ),
}
B200 = Device("cuda-nvidia-b200-148", "cuda", "NVIDIA B200", "sm_100", 148)
ON = {"mxfp4_tiles": B200}  # what does not run on an H200
ALL: list[tuple[str, type, dict[str, Any]]] = [
    *(
        (f"Backend_{name}", BackendContract, {"backend": BACKENDS.get(name), "problems": p})
        for name, p in OF_BACKEND.items()
    ),
    *(
        (f"Family_{name}", FamilyContract, {"family": FAMILIES.get(name), "problems": p})
        for name, p in OF_FAMILY.items()
    ),
    *(
        (
            f"Kernel_{name}",
            KernelContract,
            {"kernel": kernel, "backend": backend, "problems": OF_KERNEL.get(name), "device": ON.get(name, H200)},
        )
        for backend in catalog.FOLDERS
        if catalog.has_compiler(backend, H200)
        for name, kernel in catalog.kernels(backend).items()
    ),
]
for _name, _contract, _members in ALL:
    globals()[f"Test{_name}"] = type(f"Test{_name}", (_contract,), _members)


def test_every_backend_family_and_kernel_of_ours_is_here() -> None:
    kernels = {name for backend in catalog.FOLDERS for name in catalog.kernels(backend)}
    of_gpus = {name for name, one in BACKENDS.items() if not one.stamps(cpu_device())}

    assert set(OF_KERNEL) == kernels
    assert set(OF_FAMILY) | {"scaled", "grouped"} == set(FAMILIES), "those have tests of their own"
    assert set(OF_BACKEND) == set(BACKENDS) - of_gpus
