"""Grouped products on a GPU whose driver is a fake, with scales and without."""

from __future__ import annotations

from typing import Any

import pytest
from fake_families import OPERANDS


def test_a_kernel_serves_grouped_products_and_torch_those_it_does_not_take(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    x, w = torch.randn(7, 16), torch.randn(3, 8, 16)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    right = torch.cat([x[:2] @ w[0].t(), x[2:] @ w[2].t()])
    gx, gw, gends, gwide = to_gpu(x, w, ends, ends.repeat_interleave(2))
    problem = Problem(family="grouped", batch=3, m=7, n=8, k=16, dtype="fp32", math_mode="ieee")
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("", 1), Axis("", 7), Axis("", 1)),
        arguments=("x.ptr", "w.ptr", "offs.ptr", "y.ptr", "x.size0", "w.size0", "x.stride0", "w.stride0", "w.stride1"),
        conditions=(Condition("x.size0", "<=", 7), Condition("w.size0", "==", 3), Condition("offs.size0", "==", 3),
                    Condition("offs.stride0", "==", 1), Condition("x.stride1", "==", 1),
                    Condition("w.stride2", "==", 1)),
    )
    record.check_for(problem)
    hook.install()
    hook.load([native.Row(problem, "exact", "eager", 7, 5, "cuda:0", packed.kernel_launch(record, 0x3002, 3),
                          packed.conditions(record.checked, 3))], 1)
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    close = lambda y: torch.allclose(host(y), right, atol=1e-4)
    said = [close(torch._grouped_mm(gx, gw.mT, offs=gends)), outcomes(), calls("cuLaunchKernel")]
    said += [close(torch._grouped_mm(gx, gw.mT, offs=gwide[::2])), outcomes()]          # its ends do not lie in a row
    [turned] = to_gpu(w.mT.contiguous())
    said += [close(torch._grouped_mm(gx, turned, offs=gends)), outcomes(), calls("cuLaunchKernel"), hook.failures()]
    bias, long_ends = to_gpu(torch.zeros(3, 8), ends.long())
    said += [close(torch._grouped_mm(gx, gw.mT, offs=gends, bias=bias)), outcomes(), calls("cuLaunchKernel")]
    said += [close(torch._grouped_mm(gx, gw.mT, offs=long_ends)), outcomes(), calls("cuLaunchKernel")]
    print(json.dumps(said))
    """,
    )
    assert said[:3] == [True, ["grouped exact 1"], 1]
    assert said[3:8] == [True, ["grouped miss 1"], True, ["grouped miss 1"], 1] and said[8] == []
    assert said[9:] == [True, ["grouped miss 1"], 1] * 2, "a bias, and ends of 64 bits"


SCALED_GROUPS = """
    x, w = (torch.randint(-2, 3, s).to(torch.float8_e4m3fn) for s in ((7, 32), (3, 16, 32)))
    sx, sw = (torch.exp2(torch.randint(-2, 3, s).float()) for s in ((7,), (3, 16)))
    long, wide = x.float() * sx.unsqueeze(1), (w.float() * sw.unsqueeze(2)).mT
    right = torch.cat([long[:2] @ wide[0], long[2:] @ wide[2]]).bfloat16()
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    gx, gw, gsx, gsw, gends = to_gpu(x, w, sx, sw, ends)
    v1, v2 = torch.ops.aten._scaled_grouped_mm, torch.ops.aten._scaled_grouped_mm_v2

    def of_v1(a=gx, b=gw.mT, scale_a=gsx, scale_b=gsw, offs=gends, **more):
        return v1(a, b, scale_a, scale_b, offs, **more)

    def of_v2(scale_a=gsx, scale_b=gsw, offs=gends, type=torch.bfloat16, fast=False):
        return v2(gx, gw.mT, [scale_a], [1], [0], [scale_b], [1], [0], offs, None, type, [], fast)
"""


def test_groups_with_scales_have_a_problem_of_their_own_and_run_as_torch_runs_them(run: Any) -> None:
    said = run(
        OPERANDS,
        SCALED_GROUPS,
        """
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    same = all(torch.equal(host(y), right) for y in (of_v1(), of_v2(fast=True)))
    texts = sorted(f"{s.problem} {s.outcome} {s.calls}" for s in hook.drain() if s.place != "cpu")
    print(json.dumps([same, texts, hook.failures()]))
    """,
    )
    rows = "grouped:fp8_e4m3>bf16:3x7x16x32,scale=row"
    assert said == [True, [f"{rows} miss 1", f"{rows},math=reduced miss 1"], []]


def test_our_kernel_serves_groups_with_scales_and_torch_what_lies_otherwise(run: Any) -> None:
    pytest.importorskip("triton")
    said = run(
        OPERANDS,
        SCALED_GROUPS,
        """
    from gemmtuned.kernels.triton.scaled_grouped import launch_record
    problem = Problem(family="grouped", batch=3, m=7, n=16, k=32, dtype="fp8_e4m3", out_dtype="bf16", scale="row")
    config = {"rows": 16, "tokens": 16, "block_k": 32, "warps": 4, "stages": 3, "swap": 1}
    record = launch_record(config, problem).launch
    record.check_for(problem)
    hook.install()
    hook.load([native.Row(problem, "exact", "eager", 7, 5, "cuda:0", packed.kernel_launch(record, 0x3004, 3),
                          packed.conditions(record.checked, 3))], 1)
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    cuda.fake_shape(16, 32, 1.0)
    room, twice_sw, twice_sx, twice_ends, long_ends, by_rows = to_gpu(
        torch.zeros(3, 24), sw.repeat_interleave(2, 1), sx.repeat_interleave(2), ends.repeat_interleave(2),
        ends.long(), w.mT.contiguous())
    made = {
        "v1": lambda: of_v1(),
        "v2": lambda: of_v2(),
        "v2 without a type": lambda: of_v2(type=None),
        "scales of W with room between groups": lambda: of_v1(scale_b=room[:, :16].copy_(gsw)),
        "scales of W in every second place": lambda: of_v2(scale_b=twice_sw[:, ::2]),
        "scales of X in every second place": lambda: of_v2(scale_a=twice_sx[::2]),
        "ends in every second place": lambda: of_v1(offs=twice_ends[::2]),
        "ends of 64 bits": lambda: of_v1(offs=long_ends),
        "W by rows": lambda: of_v1(b=by_rows),
        "fast sums": lambda: of_v2(fast=True),
    }
    said, before = {}, 0
    for what, call in made.items():
        right_one = torch.equal(host(call()), right)
        launched = calls("cuLaunchKernel")
        said[what] = [right_one, launched - before, *outcomes()]
        before = launched
    print(json.dumps([said, hook.failures()]))
    """,
    )
    served, torchs = [True, 1, "grouped exact 1"], [True, 0, "grouped miss 1"]
    assert said == [
        {
            "v1": served,
            "v2": served,
            "v2 without a type": served,
            "scales of W with room between groups": served,
            "scales of W in every second place": torchs,
            "scales of X in every second place": torchs,
            "ends in every second place": torchs,
            "ends of 64 bits": torchs,
            "W by rows": torchs,
            "fast sums": torchs,  # another problem, with a verdict of its own
        },
        [],
    ]
