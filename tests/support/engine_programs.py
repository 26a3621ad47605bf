"""Programs that register operators as engines do, for tests of how these are counted."""

from __future__ import annotations

ORDERS = """
    import itertools, json, sys, threading
    import gemmtuned
    import torch
    from torch.library import Library

    torch.set_num_threads(1)
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    from gemmtuned.hooks import activate
    hook = activate.current()
    definition = Library("_C", "FRAGMENT")
    definition.define("onednn_mm(Tensor! c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()")
    definition.define("int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
                      "ScalarType out_dtype, bool is_vnni) -> Tensor")
    c, a = torch.zeros(2, 8), torch.ones(2, 16)
    there = {}

    def look():
        if hook is not None:
            hook.patches.look_for_foreign()

    def put(name, value, keeps=False):
        # a library of its own, as each engine or user has it; `keeps`: it calls the kernel that it found for the rest
        kept = torch.library.get_kernel("_C::onednn_mm", "CPU") if keeps else None
        library = Library("_C", "IMPL")

        def into(keys, c, a, bias, handler):
            c.fill_(value)
            if kept is not None:
                kept.call_boxed(keys, c, a, bias, handler)
                c.add_(100)

        library.impl("onednn_mm", into, "CPU", with_keyset=True, allow_override=True)
        library.impl("int8_scaled_mm_with_quant", lambda *operands: torch.full((2, 8), value), "CPU",
                     allow_override=True)
        there[name] = library

    def take(name):
        there.pop(name)._destroy()

    def call():
        gave = []
        for f in (lambda: torch.ops._C.onednn_mm(c, a, None, a), lambda: c.copy_(
            torch.ops._C.int8_scaled_mm_with_quant(a, a, a, None, torch.float, False))):
            try:
                f()
                gave.append(c.unique().tolist())
            except Exception as err:
                gave.append(type(err).__name__ + ": " + str(err).split(" registered at ")[0].split(". ")[0][:100])
        return gave
"""


STAND_INS = """
    import json, re, threading
    import torch
    from torch.library import Library
    from gemmtuned.hooks import activate
    from gemmtuned.hooks.engine_operators import operators

    hook = activate.current()
    m, n, k, fp8, bf16 = 4, 128, 256, torch.float8_e4m3fn, torch.bfloat16
    kept = {}

    def fragment(space):
        return kept.setdefault(space, Library(space, "FRAGMENT"))

    def operands(one, names):
        # as the operator takes them, by name; what only it knows is a number of the right type
        x = torch.ones(m, k).to(bf16 if one.form.startswith("opaque") else fp8)
        w = torch.ones(n, k).to(fp8)
        known = {one.x: x, one.y: torch.zeros(m, n, dtype=bf16), one.w: w.t() if one.form in ("kn", "shuffled") else w,
                 one.scale_x: torch.ones(m, 2), one.scale_w: torch.ones(1, 2), one.out: 15}
        if one.form in ("kn", "shuffled"):
            known[one.scale_w] = torch.ones(2, 1)
        if one.sums_w:
            known |= {one.x: torch.ones(m, k).char(), one.w: torch.ones(n, k).char().t(), one.scale_x: torch.ones(m, 1),
                      one.scale_w: torch.ones(1, n), one.sums_w: torch.ones(n).int(), one.zero_x: torch.ones(m).int()}
        if one.form == "pairs":
            x, w, sx, sw = (torch.ones(rows, k // step).byte() for step in (2, 32) for rows in (m, n))
            known |= {one.x: x, one.w: w, one.scale_x: sx, one.scale_w: sw}
        if one.form == "opaque batched":
            known |= {one.x: torch.ones(3, m, k).to(bf16), one.y: torch.zeros(3, m, n, dtype=bf16)}
        return [known.get(name, default(kind)) for kind, name in names]

    def default(kind):
        return None if kind.endswith("?") else {
            "Tensor": torch.ones(1), "int": 0, "int[]": [128, 128], "bool": False, "str": ""}[kind]

    def stand_in(one, names):
        at = [name for _, name in names].index(one.y) if one.y else None

        def kernel(*given):
            if at is None:
                return torch.full((m, n), 2.0, dtype=bf16)
            given[at].fill_(2.0)

        return kernel
"""
