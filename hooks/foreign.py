"""Operators of engines that are products at heart: which they are, and that their calls are seen.

vLLM, SGLang and others call operators of their own for 8-bit and packed weights, which aten never sees.  Each is
listed here with the schema that it had when this was written, which of its arguments is what, and the form of its
weight.  The hook's thread looks for those that are not there yet: an engine loads its extension long after torch, and
whoever registers last is called.  One whose schema has changed is left alone and named.  Where the kernel beneath ours
is destroyed, ours is taken back with the next call, and the look after that stands before what is there then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gemmtuned.configs.real import allocate_lock
from gemmtuned.configs.say import tell
from gemmtuned.hooks.declared import Declaration, Declared
from gemmtuned.hooks.native.library import Native, NativeError

log = logging.getLogger("gemmtuned.hooks")
FORMS: Final = ("kn", "nk", "opaque")  # index: Form of foreign.h


@dataclass(frozen=True, kw_only=True)
class Operator:
    """schema: types and names of its arguments and results, without aliases.  y to bias: names of its arguments, ""
    where it has none; y is written into, and is the result where it is "".  out: the argument with the result's type.

    form: `kn` for W [K, N] as torch's _scaled_mm takes it, `nk` for [N, K], `opaque` where the weight is packed.
    """

    schema: str
    x: str
    y: str = ""
    w: str = ""
    scale_x: str = ""
    scale_w: str = ""
    bias: str = ""
    out: str = ""
    form: str = "opaque"

    @cached_property
    def name(self) -> str:
        """With its namespace: `_C::cutlass_scaled_mm`."""
        return self.schema.partition("(")[0]

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """Their numbers, as Native.stand_before takes them."""
        inside = self.schema.partition("(")[2].rpartition(") ->")[0]
        names = [part.split()[-1] for part in inside.split(", ")]
        asked = (self.y, self.x, self.w, self.scale_x, self.scale_w, self.bias, self.out)
        return tuple(names.index(name) if name else -1 for name in asked)


# vLLM 0.32 (csrc/torch_bindings.cpp, csrc/cpu/torch_bindings.cpp), SGLang's sgl_kernel 0.5
OPERATORS: Final = (
    Operator(
        schema="_C::cutlass_scaled_mm(Tensor out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) "
        "-> ()",
        y="out", x="a", w="b", scale_x="a_scales", scale_w="b_scales", bias="bias", form="kn",
    ),
    Operator(
        schema="_C::cutlass_scaled_mm_azp(Tensor out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
        "Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()",
        y="out", x="a", bias="bias",
    ),
    Operator(
        schema="_C::onednn_mm(Tensor c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()", y="c", x="a", bias="bias"
    ),
    Operator(
        schema="_C::onednn_scaled_mm(Tensor c, Tensor a, Tensor a_scales, Tensor? azp, Tensor? azp_adj, Tensor? bias, "
        "Tensor handler_tensor) -> ()",
        y="c", x="a", bias="bias",
    ),
    Operator(
        schema="_C::weight_packed_linear(Tensor out, Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> ()",
        y="out", x="mat1", bias="bias",
    ),
    Operator(
        schema="_C::int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, int out_dtype, "
        "bool is_vnni) -> (Tensor)",
        x="mat1", bias="bias",
    ),
    Operator(
        schema="sgl_kernel::fp8_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, int out_dtype, "
        "Tensor? bias) -> (Tensor)",
        x="mat_a", w="mat_b", scale_x="scales_a", scale_w="scales_b", bias="bias", out="out_dtype", form="kn",
    ),
    Operator(
        schema="sgl_kernel::int8_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, "
        "int out_dtype, Tensor? bias) -> (Tensor)",
        x="mat_a", w="mat_b", scale_x="scales_a", scale_w="scales_b", bias="bias", out="out_dtype", form="kn",
    ),
    Operator(
        schema="trtllm::fp8_block_scaling_gemm_impl(Tensor mat1, Tensor mat2, Tensor mat1_scale, Tensor mat2_scale) "
        "-> (Tensor)",
        x="mat1",
    ),
)  # fmt: skip


class ForeignOperators:
    """Those that are seen in this process."""

    def __init__(self, operators: tuple[Operator, ...] = OPERATORS) -> None:
        self._operators = operators
        self._looking = allocate_lock()
        self._declared = Declared()
        self._announced: list[Declaration] = []
        self._looked_at: set[str] = set()
        self.seen: list[str] = []
        self.changed: dict[str, str] = {}  # name -> why it is left alone

    def look(self, library: Native) -> None:
        """Stand in front of what has come since the last look, or has come again; some 30 us."""
        if not self._looking.acquire(False):  # another thread looks, and before a capture nobody waits for long
            return
        try:
            stands = {one.name: self._stand(library, one) for one in self._operators if one.name not in self.changed}
            self._announced += self._declared.new()
            for declared in self._announced:
                if declared.is_registered:
                    self._looked_at.add(declared.name)
                    if declared.name not in self.changed:
                        stands[declared.name] = self._listen(library, declared)
            self.seen = [name for name, where in stands.items() if where]
            library.watch(operator for where in stands.values() for operator in where)
        finally:
            self._looking.release()

    def after_fork(self) -> None:
        """In a forked child, whose parent may have been looking."""
        self._looking = allocate_lock()

    def is_behind(self) -> bool:
        """Whether an operator that a package declares has come since the last look."""
        return self._declared.has_new() or any(
            declared.is_registered for declared in self._announced if declared.name not in self._looked_at
        )

    def _stand(self, library: Native, one: Operator) -> list[str]:
        try:
            return library.stand_before(one.name, one.schema, one.arguments, FORMS.index(one.form))
        except NativeError as err:
            return self._leave(one.name, err)

    def _listen(self, library: Native, one: Declaration) -> list[str]:
        try:
            return library.stand_before(one.name, "", one.arguments(), FORMS.index(one.form), one.code)
        except (NativeError, ValueError) as err:
            return self._leave(one.name, err)

    def _leave(self, name: str, why: Exception) -> list[str]:
        self.changed[name] = str(why)
        tell(log, logging.WARNING, "calls of %s are not counted: %s", name, why)
        return []
