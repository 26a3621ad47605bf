"""Data: operators of engines that compute products, as the engines' sources declared them when this was written.

    _C, vllm     vLLM: csrc/torch_bindings.cpp, those of csrc/libtorch_stable and csrc/cpu, and what vllm/model_executor
                 registers from Python
    sgl_kernel   SGLang: sgl-kernel/csrc/common_extension.cc, sgl-kernel/csrc/cpu/torch_extension_cpu.cpp
    deep_gemm    DeepGEMM where it registers with torch; its schemas differ from fork to fork
    gemmtuned    our own: gemmtuned/ops/blocks.py, int8.py and weight_only.py
    trtllm       TensorRT-LLM: cpp/tensorrt_llm/thop/fp8BlockScalingGemm.cpp

An operator that computes a scaled product of plain operands is counted as such a problem.  If its weight is packed, or
it does more than a product (quantises X), its calls are opaque: they are counted, never tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Final

from gemmtuned.configs.value_class import value_class

FORMS: Final = ("kn", "nk", "opaque", "opaque batched", "weights", "shuffled", "pairs")  # index: Form of foreign.h
ROUTED: Final = 16  # kRouted of foreign.h
_ENGINE_SHIFT: Final = 8  # kEngineShift of call.h


@value_class(kw_only=True)
class Operator:
    """One operator of an engine.

    schema: types and names of its arguments and results, without aliases and defaults; the operator's name alone if
    these differ between versions: its calls are then opaque, if it has tensor arguments named x (and y).
    y to bias: names of its arguments, "" for those it has not.  y is the argument it writes into; "": it returns y.
    out: the argument with the result's type.  zero_x, sums_w: those by which zero points of X are subtracted.
    unless: a switch that has it do more than the product; where it is set, the call is left to the operator.
    blocks: how many rows of W and how much of K have one scale; other than 128 by 128, its calls are opaque.
    form: `kn` for W [K, N] as torch's _scaled_mm takes it, `shuffled` for the same in AITER's order, `nk` for [N, K],
    `opaque` for a packed weight, `opaque batched` for one per matrix of x [B, M, K], `weights` for [N, K] of which only
    the weight is quantised, `pairs` for [N, K / 2] of two numbers a byte, as X holds them.
    routed: calls that torch's own product could take may be served by the solutions for it; where it is an engine's, by
    those that have won over its own kernel.
    engine: its number among those of configs/engine_races.py, from 1; 0: it is none.
    """

    schema: str
    x: str
    y: str = ""
    w: str = ""
    scale_x: str = ""
    scale_w: str = ""
    bias: str = ""
    out: str = ""
    zero_x: str = ""
    sums_w: str = ""
    unless: str = ""
    blocks: str = ""
    form: str = "opaque"
    routed: bool = False
    engine: int = 0

    @property
    def name(self) -> str:
        """The operator's name with its namespace: `_C::cutlass_scaled_mm`."""
        return self.schema.partition("(")[0]

    @property
    def is_exact(self) -> bool:
        """Whether `schema` is the whole schema, and not the name alone."""
        return "(" in self.schema

    @property
    def code(self) -> int:
        """The form of its weight as Native.stand_before takes it, with flags."""
        return FORMS.index(self.form) | (ROUTED if self.routed else 0) | self.engine << _ENGINE_SHIFT

    @property
    def arguments(self) -> tuple[int, ...]:
        """Positions of the arguments, as Native.stand_before takes them; the whole schema must be known."""
        inside = self.schema.partition("(")[2].rpartition(") ->")[0]
        return self.among([part.split()[-1] for part in inside.split(", ")])

    def among(self, names: Sequence[str]) -> tuple[int, ...]:
        """Positions among these names of arguments. Raises ValueError if one is not there."""
        asked = (
            self.y, self.x, self.w, self.scale_x, self.scale_w, self.bias, self.out, self.zero_x, self.sums_w,
            self.unless, self.blocks,
        )  # fmt: skip
        return tuple(names.index(name) if name else -1 for name in asked)


def _vllm() -> tuple[Operator, ...]:
    """vLLM 0.32."""
    return (
        Operator(
            schema="_C::cutlass_scaled_mm(Tensor out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
            "Tensor? bias) -> ()",
            y="out", x="a", w="b", scale_x="a_scales", scale_w="b_scales", bias="bias",
            form="kn", routed=True, engine=1,
        ),
        Operator(
            schema="_C::cutlass_scaled_mm_azp(Tensor out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
            "Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()",
            y="out", x="a", w="b", scale_x="a_scales", scale_w="b_scales", bias="bias", zero_x="azp", sums_w="azp_adj",
            form="kn", routed=True, engine=2,
        ),
        Operator(
            schema="vllm::fp8_gemm_nt_op(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, "
            "Tensor output, bool use_deep_gemm_e8m0) -> ()",
            y="output", x="q_input", w="weight", scale_x="input_scale", scale_w="weight_scale", form="nk",
            unless="use_deep_gemm_e8m0", routed=True, engine=3,
        ),
        Operator(
            schema="vllm::w8a8_triton_block_scaled_mm_func(Tensor qx, Tensor weight, Tensor x_scale, "
            "Tensor weight_scale, int[] block_size, int output_dtype) -> (Tensor)",
            x="qx", w="weight", scale_x="x_scale", scale_w="weight_scale", out="output_dtype", blocks="block_size",
            form="nk", routed=True, engine=7,
        ),
        Operator(
            schema="vllm::dynamic_flashinfer_deepgemm_blockscale_gemm(Tensor input, Tensor weight, "
            "Tensor weight_scale, int group_size, bool use_deep_gemm_e8m0) -> (Tensor)",
            x="input",
        ),
        Operator(
            schema="vllm::flashinfer_fp8_blockscale_gemm(Tensor input, Tensor weight, Tensor weight_scale) -> (Tensor)",
            x="input",
        ),
    )  # fmt: skip


def _vllm_packed() -> tuple[Operator, ...]:
    """vLLM 0.32: weights of 4 and 8 bits on GPUs."""
    return (
        Operator(
            schema="_C::marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, "
            "Tensor b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, "
            "Tensor? perm_or_none, Tensor workspace, int b_type_id, int size_m, int size_n, int size_k, "
            "bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> (Tensor)",
            x="a", bias="b_bias_or_none",
        ),
        Operator(
            schema="_C::machete_mm(Tensor A, Tensor B, int b_type, int? out_type, Tensor? group_scales, "
            "Tensor? group_zeros, int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) "
            "-> (Tensor)",
            x="A",
        ),
        Operator(
            schema="_C::cutlass_w4a8_mm(Tensor A, Tensor B, Tensor group_scales, int group_size, "
            "Tensor channel_scales, Tensor token_scales, int? out_type, str? maybe_schedule) -> (Tensor)",
            x="A",
        ),
        Operator(
            schema="_C::awq_gemm(Tensor _in_feats, Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, "
            "int split_k_iters) -> (Tensor)",
            x="_in_feats",
        ),
        Operator(
            schema="_C::gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, "
            "Tensor b_g_idx, bool use_exllama, bool use_v2_format, int bit) -> (Tensor)",
            x="a",
        ),
    )  # fmt: skip


def _vllm_on_cpus() -> tuple[Operator, ...]:
    """vLLM 0.32 built for CPUs."""
    return (
        Operator(
            schema="_C::onednn_mm(Tensor c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()",
            y="c", x="a", bias="bias",
        ),
        Operator(
            schema="_C::onednn_scaled_mm(Tensor c, Tensor a, Tensor a_scales, Tensor? azp, Tensor? azp_adj, "
            "Tensor? bias, Tensor handler_tensor) -> ()",
            y="c", x="a", bias="bias",
        ),
        Operator(
            schema="_C::weight_packed_linear(Tensor out, Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> ()",
            y="out", x="mat1", bias="bias",
        ),
        Operator(
            schema="_C::int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
            "int out_dtype, bool is_vnni) -> (Tensor)",
            x="mat1", bias="bias",
        ),
        Operator(
            schema="_C::fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, "
            "int out_dtype, bool is_vnni) -> (Tensor)",
            x="mat1", bias="bias",
        ),
        Operator(
            schema="_C::fp8_scaled_mm_with_quant(Tensor act, Tensor? act_scales, bool channelwise, Tensor weight, "
            "Tensor weight_scales, Tensor? bias, int output_dtype) -> (Tensor)",
            x="act", bias="bias",
        ),
        Operator(
            schema="_C::int4_scaled_mm_cpu(Tensor x, Tensor w, Tensor w_zeros, Tensor w_scales, Tensor? bias) "
            "-> (Tensor)",
            x="x", bias="bias",
        ),
        Operator(
            schema="_C::cpu_gemm_wna16(Tensor input, Tensor q_weight, Tensor output, Tensor scales, Tensor? zeros, "
            "Tensor? bias, int pack_factor, str isa_hint) -> ()",
            y="output", x="input", bias="bias",
        ),
        Operator(
            schema="_C::bmm_cpu(Tensor out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
            y="out", x="mat1", form="opaque batched",
        ),
    )  # fmt: skip


def _sglang() -> tuple[Operator, ...]:
    """sgl_kernel 0.3 to 0.5, for GPUs and for CPUs."""
    scaled = "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, int out_dtype, Tensor? bias) -> (Tensor)"
    plain = partial(
        Operator, x="mat_a", w="mat_b", scale_x="scales_a", scale_w="scales_b", out="out_dtype", form="kn", routed=True
    )
    return (
        plain(schema=f"sgl_kernel::fp8_scaled_mm{scaled}", bias="bias", engine=4),
        plain(schema=f"sgl_kernel::int8_scaled_mm{scaled}", bias="bias", engine=5),
        plain(
            schema="sgl_kernel::fp8_blockwise_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, "
            "int out_dtype) -> (Tensor)",
            engine=6,
        ),
        Operator(
            schema="sgl_kernel::gptq_marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor b_scales, "
            "Tensor? global_scale_or_none, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, "
            "Tensor workspace, int b_q_type_id, int size_m, int size_n, int size_k, bool is_k_full, "
            "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> (Tensor)",
            x="a",
        ),
        Operator(
            schema="sgl_kernel::weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> (Tensor)",
            x="mat1", bias="bias",
        ),
        Operator(
            schema="sgl_kernel::int8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales1, Tensor scales2, "
            "Tensor? bias, int out_dtype, bool is_vnni) -> (Tensor)",
            x="mat1", bias="bias",
        ),
        Operator(
            schema="sgl_kernel::int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
            "int out_dtype, bool is_vnni) -> (Tensor)",
            x="mat1", bias="bias",
        ),
        Operator(
            schema="sgl_kernel::fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, "
            "Tensor? bias, int out_dtype, bool is_vnni) -> (Tensor)",
            x="mat1", bias="bias",
        ),
        Operator(
            schema="sgl_kernel::bmm_cpu(Tensor out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
            y="out", x="mat1", form="opaque batched",
        ),
    )  # fmt: skip


def _ours() -> tuple[Operator, ...]:
    """The operators that gemmtuned.ops calls."""
    scaled = "Tensor out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales"
    ours = partial(Operator, y="out", routed=True)
    plain = partial(ours, x="a", w="b", scale_x="a_scales", scale_w="b_scales", form="kn")
    return (
        plain(schema=f"gemmtuned::int8_scaled_mm({scaled}, Tensor? bias) -> ()", bias="bias"),
        plain(
            schema=f"gemmtuned::int8_scaled_mm_zero({scaled}, Tensor sums, Tensor? zero, Tensor? bias) -> ()",
            bias="bias", zero_x="zero", sums_w="sums",
        ),
        plain(schema=f"gemmtuned::shuffled_scaled_mm({scaled}, Tensor? bias) -> ()", bias="bias", form="shuffled"),
        plain(schema=f"gemmtuned::block_scaled_mm({scaled}) -> ()"),
        plain(schema=f"gemmtuned::mxfp4_mm({scaled}, Tensor? bias) -> ()", bias="bias", form="pairs"),
        ours(
            schema="gemmtuned::weight_only_mm(Tensor out, Tensor x, Tensor w, Tensor scales, Tensor? bias) -> ()",
            x="x", w="w", scale_w="scales", bias="bias", form="weights",
        ),
    )  # fmt: skip


@cache
def operators() -> tuple[Operator, ...]:
    """All of them, made when first asked for: not while the program imports torch."""
    return (
        *_vllm(),
        *_vllm_packed(),
        *_vllm_on_cpus(),
        *_sglang(),
        *_ours(),
        Operator(schema="deep_gemm::fp8_fp4_gemm_nt", y="d", x="a"),
        Operator(
            schema="trtllm::fp8_block_scaling_gemm_impl(Tensor mat1, Tensor mat2, Tensor mat1Scale, Tensor mat2Scale) "
            "-> (Tensor)",
            x="mat1",
        ),
    )


# Modules whose functions make products that no dispatcher sees: name -> what they are
UNSEEN: Final = {
    "deep_gemm": "DeepGEMM's functions",
    "flashinfer": "FlashInfer's functions",
    "humming": "Humming's kernels",
    "sglang.srt.layers.moe.fused_moe_triton": "SGLang's fused mixtures of experts",
    "vllm.model_executor.layers.fused_moe": "vLLM's fused mixtures of experts",
}
