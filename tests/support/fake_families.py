"""Programs of the fake driver with products of several families: what they begin with."""

from __future__ import annotations

OPERANDS = """
    from contextlib import suppress
    from dataclasses import replace
    from itertools import count
    from gemmtuned.configs.launch import LibraryLaunch
    idents = count(7)

    def served(problem, record, code, launch, more=(), engines=0):
        hook.install()
        rows = [native.Row(p, "exact", "eager", next(idents), c, "cuda:0", one, packed.conditions(r.checked, rank),
                           scales_sums=c == 6, engines=engines)
                for p, r, c, one in [(problem, record, code, launch), *more]
                for rank in [3 if p.family == "batched" else 2]]
        hook.load(rows, 1)
        hook.set_switches(native.CAPTURE | native.DISPATCH)

    def library(problem, *conditions, **more):
        types = dict(x=problem.dtype, w=problem.wdtype, y=problem.out_dtype, bias=problem.out_dtype)
        record = LibraryLaunch(library="cublaslt", algo="00" * 64, layout="nt", types=types, **more,
                               conditions=tuple(Condition(*c) for c in conditions))
        record.check_for(problem)
        return record, 6, packed.library_launch(record)

    def host(t):
        return torch.ops.fake.on_host(t)

    def outcomes():
        return sorted(f"{s.problem.family} {s.outcome} {s.calls}" for s in hook.drain() if s.place != "cpu")
"""
SCALED = """
    x8 = torch.randint(-2, 3, (4, 16)).to(torch.float8_e4m3fn)
    w8 = torch.randint(-2, 3, (8, 16)).to(torch.float8_e4m3fn)
    sx, sw = torch.exp2(torch.randint(-2, 3, (4, 1)).float()), torch.exp2(torch.randint(-2, 3, (8, 1)).float())
    right = ((x8.float() * sx) @ (w8.float() * sw).t()).bfloat16()
    gx8, gw8, gsx, gsw = to_gpu(x8, w8, sx, sw)
    problem = Problem(family="scaled", m=4, n=8, k=16, dtype="fp8_e4m3", wdtype="fp8_e4m3", out_dtype="bf16",
                      scale="row", wscale="row", scale_dtype="fp32", wscale_dtype="fp32", math_mode="ieee")
    sizes = (("scale_x.numel", "==", 4), ("scale_w.numel", "==", 8), ("scale_x.contiguous", "==", 1),
             ("scale_w.contiguous", "==", 1), ("x.stride1", "==", 1), ("w.stride1", "==", 1))

    def of_v1(**more):
        return torch._scaled_mm(gx8, gw8.t(), gsx, gsw.t(), out_dtype=torch.bfloat16, **more)

    def of_v2():
        kind = [0 if gsx.numel() == 1 else 1]
        return torch.ops.aten._scaled_mm_v2(gx8, gw8.t(), [gsx], kind, [], [gsw.t()], kind, [], None, torch.bfloat16)

    def check(calls):
        out = torch.ops.fake.on_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
        wide = torch.ops.fake.on_gpu(torch.zeros(4, 16, dtype=torch.bfloat16))[:, ::2]  # not written into by a kernel
        made = [of_v1(), of_v2(), of_v1(out=out), of_v1(out=wide)]
        same = all(torch.equal(host(y), right) for y in made)
        told = [made[0].dtype == torch.bfloat16, made[0].stride() == (8, 1), made[2].data_ptr() == out.data_ptr()]
        return [same, told, outcomes(), calls(), hook.failures()]
"""
# An engine whose operator only notes how many operands came
ENGINE = """
    from gemmtuned.hooks.engine_operators import operators
    engine, stock = torch.library.Library("_C", "FRAGMENT"), []
    engine.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
                  "Tensor? bias) -> ()")
    engine.impl("cutlass_scaled_mm", lambda *operands: stock.append(len(operands)), "CUDA")
"""
