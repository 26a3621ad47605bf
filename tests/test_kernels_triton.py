"""Our Triton kernels without a GPU: right in the interpreter, and clean from the compiler for three architectures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.compile import compile_record
from gemmtuned.kernels.triton import direct, gemv, tiles, warp_split_k
from gemmtuned.kernels.triton.limits import shared_limit

MODULES = (gemv, direct, warp_split_k, tiles)
ARCHS = ("sm_80", "sm_90", "gfx942")
CASES = 17


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("triton_interpreted.py")
    done = subprocess.run([sys.executable, "-P", script], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(autouse=True, scope="module")
def own_compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield
    patch.undo()


@pytest.mark.parametrize("number", range(CASES))
def test_kernel_is_right_at_odd_shapes_with_nan_padding(interpreted: list[dict[str, Any]], number: int) -> None:
    assert len(interpreted) == CASES
    seen = interpreted[number]

    assert seen["error"] <= (2e-2 if "bfloat16" in seen["dtype"] else 3e-3), seen


def test_every_launch_leaves_its_counters_zero(interpreted: list[dict[str, Any]]) -> None:
    assert all(seen["clean"] for seen in interpreted), interpreted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAME)
def test_best_guess_compiles_without_spills_and_fits(module: Any, arch: str) -> None:
    m = 1 if module is gemv else 8
    if module is direct and arch == "gfx942":
        assert module.configs(m, 576, 7168, 304, arch=arch) == []  # its instruction is NVIDIA's
        return

    for dtype, bias, n, k in (("bf16", True, 576, 7168), ("fp16", False, 1000, 1032)):
        config = module.configs(m, n, k, 132, arch=arch)[0]
        record = module.launch_record(config, Problem(m=m, n=n, k=k, bias=bias, dtype=dtype))
        binary = compile_record(record, arch)

        assert binary.spill_bytes == 0
        assert binary.registers is not None and 0 < binary.registers <= 512
        assert binary.shared_bytes <= shared_limit(arch)
        assert binary.data[:4] == b"\x7fELF"


def test_weights_of_the_direct_kernel_never_touch_shared_memory() -> None:
    from gemmtuned.kernels.compile import compile_kernel

    config = {"rows": 16, "tokens": 8, "block_k": 128, "split": 1, "warps": 4, "prefetch": 0, "evict": 1}
    ptx = compile_kernel(direct.launch_record(config, Problem(m=8, n=64, k=1024)), "sm_90").asm["ptx"]

    assert "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in ptx
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "cp.async.c" not in ptx and "ldmatrix" not in ptx


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAME)
@pytest.mark.parametrize("shape", [(1, 576, 7168), (8, 256, 7168), (32, 7168, 2048), (4, 17, 40), (2048, 4096, 4096)])
def test_space_is_small_and_every_config_in_it_can_be_launched(module: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    space = module.configs(m, n, k, 132)

    assert len(space) <= 48
    assert len({json.dumps(config, sort_keys=True) for config in space}) == len(space)
    for config in space:
        record = module.launch_record(config, Problem(m=m, n=n, k=k))
        assert all(size > 0 for size in record.grid_size(m))
    if module is tiles:
        assert space


def test_what_a_kernel_cannot_run_is_refused_with_a_reason() -> None:
    good = gemv.configs(1, 64, 512, 132)[0]
    for module, config, problem, reason in (
        (gemv, good, Problem(m=2, n=64, k=512), "M = 1"),
        (gemv, {**good, "colour": 1}, Problem(m=1, n=64, k=512), "config has"),
        (gemv, {**good, "rows": -1}, Problem(m=1, n=64, k=512), "rows is -1"),
        (gemv, good, Problem(m=1, n=64, k=512, dtype="fp32"), "bf16 and fp16"),
        (gemv, good, Problem(m=1, n=64, k=512, layout="nn"), "layout nt"),
        (tiles, tiles.configs(64, 64, 512, 132)[0], Problem(m=1 << 25, n=64, k=512), "larger than a device takes"),
    ):
        with pytest.raises(CandidateFailed, match=reason):
            module.launch_record(config, problem)


def test_kernel_that_needs_too_much_shared_memory_is_a_failed_candidate() -> None:
    config = {"rows": 128, "tokens": 128, "block_k": 128, "split": 1, "group": 1, "swap": 0, "warps": 8, "stages": 5}
    record = tiles.launch_record(config, Problem(m=128, n=256, k=2048))

    with pytest.raises(CandidateFailed, match="shared memory"):
        compile_record(record, "sm_80")


def test_kernel_that_does_not_compile_is_a_failed_candidate() -> None:
    config = {"rows": 3, "block_k": 64, "split": 1, "warps": 1, "unroll": 1, "evict": 0}

    with pytest.raises(CandidateFailed, match="does not compile"):
        compile_record(gemv.launch_record(config, Problem(m=1, n=64, k=512)), "sm_90")
