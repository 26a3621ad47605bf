"""Stand-ins for vLLM, SGLang's kernels, DeepGEMM and FlashInfer: packages with their operators' schemas, on this CPU.

Schemas and signatures as documented: vLLM 0.26 and 0.32 (csrc/torch_bindings.cpp), sglang-kernel 0.4.4,
sgl-deep-gemm 0.2.5, DeepGEMM's README, docs.flashinfer.ai (flashinfer.gemm).
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

PRODUCT: Final = """
import torch
from torch.library import Library

def product(x, b, sx, sb):
    \"\"\"x [M, K], b [K, N]; a scale each of the whole, of rows and columns, or of 128 of K (by 128 columns).\"\"\"
    if sx.dim() == 2 and sx.shape[1] > 1 or sb.numel() > b.shape[1]:
        sx = sx.repeat_interleave(128, 1)[:, : x.shape[1]]
        sb = sb.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
        return (x.double() * sx) @ (b.double() * sb)
    return x.double() @ b.double() * sx.double().reshape(-1, 1) * sb.double().reshape(1, -1)
"""
PACKAGES: Final = {
    "vllm": {
        "vllm/__init__.py": "",
        "vllm/_custom_ops.py": """
            from .product import *
            C, calls = Library("_C", "FRAGMENT"), []
            C.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
                     "Tensor? bias) -> ()")
            def cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias):
                calls.append(tuple(a.shape))
                (m, k), n = a.shape, b.shape[1]
                assert a.stride(1) == b.stride(0) == out.stride(1) == 1 and out.stride(0) % 16 == b.stride(1) % 16 == 0
                assert a_scales.dtype == b_scales.dtype == torch.float32
                if a_scales.numel() in (1, m) and b_scales.numel() in (1, n):
                    assert a_scales.is_contiguous() and b_scales.is_contiguous()
                else:  # blocks, as c3x/scaled_mm_helper.hpp and scaled_mm_blockwise_sm90_fp8_dispatch.cuh check them
                    assert a_scales.shape == (m, -(-k // 128)) and b_scales.shape == (-(-k // 128), -(-n // 128))
                    assert bias is None and m % 4 == 0 and a_scales.stride(0) == b_scales.stride(0) == 1
                y = product(a, b, a_scales, b_scales)
                out.copy_(y if bias is None else y + bias.double())
            C.impl("cutlass_scaled_mm", cutlass_scaled_mm, "CPU")
            C.define("cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
                     "Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()")
            def cutlass_scaled_mm_azp(out, a, b, a_scales, b_scales, azp_adj, azp, bias):
                assert b.stride(0) == 1 and azp_adj.dtype == torch.int32
                less = azp_adj.double() if azp is None else azp.double()[:, None] * azp_adj.double()
                whole = a.double() @ b.double() - less
                y = whole * a_scales.double().reshape(-1, 1) * b_scales.double().reshape(1, -1)
                out.copy_(y if bias is None else y + bias.double())
            C.impl("cutlass_scaled_mm_azp", cutlass_scaled_mm_azp, "CPU")
            """,
        "vllm/model_executor/kernels/linear/scaled_mm/deep_gemm.py": """
            from vllm.product import *
            V = Library("vllm", "FRAGMENT")
            V.define("fp8_gemm_nt_op(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, "
                     "Tensor(a!) output, bool use_deep_gemm_e8m0) -> ()")
            def fp8_gemm_nt_op(q_input, input_scale, weight, weight_scale, output, e8m0):
                assert not e8m0 and input_scale.stride(0) == 1 and weight.is_contiguous()
                output.copy_(product(q_input, weight.t(), input_scale, weight_scale.t()))
            V.impl("fp8_gemm_nt_op", fp8_gemm_nt_op, "CPU")
            """,
        "vllm/model_executor/kernels/linear/scaled_mm/triton.py": """
            from vllm.product import *
            V = Library("vllm", "FRAGMENT")
            def w8a8_triton_block_scaled_mm_func(qx: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor,
                                                 weight_scale: torch.Tensor, block_size: list[int],
                                                 output_dtype: torch.dtype) -> torch.Tensor:
                assert list(block_size) == [128, 128] and qx.is_contiguous()
                assert (x_scale.shape, weight_scale.shape) == tuple(
                    (-(-t.shape[0] // rows), -(-t.shape[1] // 128)) for t, rows in ((qx, 1), (weight, 128)))
                return product(qx, weight.t(), x_scale, weight_scale.t()).to(output_dtype)
            name = "w8a8_triton_block_scaled_mm_func"  # as vLLM's direct_register_custom_op has it
            V.define(name + torch.library.infer_schema(w8a8_triton_block_scaled_mm_func, mutates_args=[]))
            V.impl(name, w8a8_triton_block_scaled_mm_func, "CPU")
            """,
    },
    "sglang-kernel": {
        "sgl_kernel/__init__.py": """
            from .product import *
            S = Library("sgl_kernel", "FRAGMENT")
            scaled = "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype"
            for name in ("fp8_scaled_mm", "int8_scaled_mm"):
                S.define(f"{name}{scaled}, Tensor? bias) -> Tensor")
            S.define(f"fp8_blockwise_scaled_mm{scaled}) -> Tensor")
            def by_rows(a, b, sa, sb, out, bias):
                assert sa.numel() == a.shape[0] and sb.numel() == b.shape[1] and b.stride(0) == 1
                y = product(a, b, sa, sb)
                return (y if bias is None else y + bias.double()).to(out)
            S.impl("fp8_scaled_mm", by_rows, "CPU")
            S.impl("int8_scaled_mm", by_rows, "CPU")
            def by_blocks(a, b, sa, sb, out):
                (m, k), n = a.shape, b.shape[1]
                assert sa.stride(0) == 1 and sb.stride(0) == 1
                assert sa.shape == (m, k // 128) and sb.shape == (k // 128, n // 128)
                return product(a, b, sa, sb).to(out)
            S.impl("fp8_blockwise_scaled_mm", by_blocks, "CPU")
            """,
    },
    "sgl-deep-gemm": {
        "deep_gemm/__init__.py": """
            from .product import *
            D = Library("deep_gemm", "FRAGMENT")
            D.define("fp8_fp4_gemm_nt(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(a!) d, Tensor? c, "
                     "int[]? recipe, int[]? recipe_a, int[]? recipe_b, str compiled_dims, bool disable_ue8m0_cast, "
                     "float? alpha, int epilogue_kind, float? epilogue_scalar, Tensor(z!)? epilogue_sfd, "
                     "Tensor(y!)? epilogue_count) -> ()")
            def fp8_fp4_gemm_nt(a, a_sf, b, b_sf, d, c, recipe, recipe_a, recipe_b, compiled_dims,
                                disable_ue8m0_cast, alpha, epilogue_kind=0, *epilogue):
                assert compiled_dims == "nk" and disable_ue8m0_cast and (c, recipe, alpha) == (None,) * 3
                assert epilogue_kind == 0 and set(epilogue) <= {None}
                d.copy_(product(a, b.t(), a_sf, b_sf.t()))
            D.impl("fp8_fp4_gemm_nt", fp8_fp4_gemm_nt, "CPU")
            """,
    },
    "deep-gemm": {
        "deep_gemm/__init__.py": """
            from .product import *
            def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
                assert disable_ue8m0_cast
                d.copy_(product(a[0], b[0].t(), a[1], b[1].t()))
            """,
    },
    "flashinfer-python": {
        "flashinfer/__init__.py": "",
        "flashinfer/gemm/__init__.py": """
            from flashinfer.product import *
            def fp8_blockscale_gemm_sm90(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None):
                assert weight_scale.shape == (-(-weight.shape[0] // 128), weight.shape[1] // 128)
                return out.copy_(product(input, weight.t(), input_scale, weight_scale.t()))
            def bmm_fp8(A, B, A_scale, B_scale, dtype, out=None, backend="cublas"):
                assert A.dim() == B.dim() == 3 and B.stride(1) == 1 and A_scale.dim() == 0 and dtype == out.dtype
                out[0].copy_(product(A[0], B[0], A_scale, B_scale))
                return out
            """,
    },
}


def install(site: Path, *names: str, version: str = "1.2.3") -> None:
    """Puts these distributions into a folder for sys.path, as pip does."""
    for name in names:
        for path, code in PACKAGES[name].items():
            file = site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(code))
            (site / path.partition("/")[0] / "product.py").write_text(PRODUCT)
        name_it(site, name, version)


def name_it(site: Path, name: str, version: str) -> None:
    """A folder for sys.path says that this distribution is installed, and nothing of it is."""
    facts = site / f"{name.replace('-', '_')}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
