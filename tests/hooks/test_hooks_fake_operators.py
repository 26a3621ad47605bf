"""Each operator of the list on the fake GPU: what stands in for torch's own there is right, with the hook, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_cuda_build import PRELUDE, build_fakes
from hooked import ForkServer, Home
from operators_of_torch import OPERATORS

# Of each operator: its operands in the order of its schema, and the result in fp64, computed without it
PROGRAM = """
    aten = torch.ops.aten
    one, half = 1.0, 0.5
    bx, bw, c, bc = torch.randn(3, 4, 16), torch.randn(3, 16, 8), torch.randn(4, 8), torch.randn(3, 4, 8)
    wt = w.t().contiguous()
    ix, iw = torch.randint(-9, 9, (32, 16), dtype=torch.int8), torch.randint(-9, 9, (16, 8), dtype=torch.int8)
    fx, fw = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
    sx, sw = torch.tensor(0.5), torch.tensor(0.25)
    rows, gw = torch.randn(7, 16), torch.randn(3, 16, 8)
    frows, fgw = rows.to(torch.float8_e4m3fn), gw.to(torch.float8_e4m3fn)
    srows, sgw = torch.rand(7) + 0.5, torch.rand(3, 8) + 0.5
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)

    def groups(x, w):
        bounds = [0, *ends.tolist()]
        return torch.cat([x[a:b] @ one for a, b, one in zip(bounds, bounds[1:], w)])

    d = lambda t: t.to(torch.float64)
    product, batch = d(x) @ d(wt), d(bx) @ d(bw)
    total, batches = half * d(c) + 2 * product, half * d(bc) + 2 * batch
    scaled = (d(fx) * d(sx)) @ (d(fw) * d(sw))
    scaled_groups = groups(d(frows) * d(srows)[:, None], d(fgw) * d(sgw)[:, None, :])
    ints, wide, more = d(ix) @ d(iw), torch.float64, {"beta": half, "alpha": 2}
    v2 = ([sx], [0], [0], [sw], [0], [0], None, torch.float32)
    v1 = (frows, fgw, srows, sgw, ends, None, None, torch.bfloat16)
    grouped_v2 = (frows, fgw, [srows], [1], [0], [sgw], [1], [0], ends, None, torch.bfloat16)
    CASES = {
        "mm": ((x, wt), product), "mm.dtype": ((x, wt, wide), product),
        "bmm": ((bx, bw), batch), "bmm.dtype": ((bx, bw, wide), batch),
        "addmm": ((c, x, wt), total), "addmm_": ((c, x, wt), total), "addmm.dtype": ((c, x, wt, wide), total),
        "baddbmm": ((bc, bx, bw), batches), "baddbmm_": ((bc, bx, bw), batches),
        "baddbmm.dtype": ((bc, bx, bw, wide), batches),
        "_addmm_activation": ((c, x, wt), total.clamp(min=0)),
        "_int_mm": ((ix, iw), ints),
        "_scaled_mm": ((fx, fw, sx, sw, None, None, torch.float32), scaled), "_scaled_mm_v2": ((fx, fw, *v2), scaled),
        "_grouped_mm": ((rows, gw, ends), groups(d(rows), d(gw))),
        "_scaled_grouped_mm": (v1, scaled_groups), "_scaled_grouped_mm_v2": (grouped_v2, scaled_groups),
    }
    def moved(operand):
        if isinstance(operand, list):
            return [moved(one) for one in operand]
        is_tensor = isinstance(operand, torch.Tensor)
        return torch.ops.fake.on_gpu(operand.clone(memory_format=torch.preserve_format)) if is_tensor else operand

    def error(name):
        base, _, form = name.partition(".")
        operands, right = CASES[base if form == "out" else name]
        options = dict(more) if "add" in base else {}
        given = [moved(one) for one in operands]
        if form == "out":
            kind = torch.int32 if base == "_int_mm" else torch.float32
            options["out"] = moved(torch.zeros(right.shape, dtype=kind))
        y = getattr(getattr(aten, base), form or "default")(*given, **options)
        written = options.get("out", given[0] if base.endswith("_") else y)
        assert y.is_cuda and y.data_ptr() == written.data_ptr(), name
        return float((d(torch.ops.fake.on_host(written)) - right).abs().max() / right.abs().max())

    names = json.loads(sys.argv[3])
    found = {name: [error(name)] for name in names}
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    for name in names:
        found[name] += [error(name), sum(s.calls for s in hook.drain() if s.place == "cuda:0")]
    print(json.dumps(found))
"""
LISTED = (*OPERATORS.everywhere, *OPERATORS.gpus_alone)


@pytest.fixture(scope="module")
def found(built_for_tests: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each operator: its error without the hook and with it, and how many of its calls the hook has counted."""
    home = Home(tmp_path_factory.mktemp("home") / "home", built_for_tests, fork_server)
    fakes = str(build_fakes(built_for_tests))
    return home.run(PRELUDE + PROGRAM, fakes, ".", json.dumps(LISTED), GEMMTUNED="0", AITER_TUNE_GEMM="0").said


@pytest.mark.parametrize("operator", LISTED)
def test_each_operator_is_right_on_the_fake_gpu_and_counted_by_the_hook(found: Any, operator: str) -> None:
    stand_in, hooked, counted = found[operator]
    most = 2**-8 if "scaled_grouped" in operator else 1e-5  # those give bf16
    assert stand_in < most and hooked < most and counted == 1
