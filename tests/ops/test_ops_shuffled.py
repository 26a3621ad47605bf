"""8-bit products of shuffled weights as one operator: the results of plain ones; what is counted and what is not."""

from __future__ import annotations

import pytest
import torch
from hooked import Home

from gemmtuned import ops
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.device import capability
from gemmtuned.ops import shuffled as own
from gemmtuned.ops import weight_only

OPERANDS = """
    import json, torch, gemmtuned
    from gemmtuned import ops
    from gemmtuned.hooks import activate
    from gemmtuned.ops import shuffled as own
    from hooked import wait_for
    torch.set_num_threads(1)

    def look():  # as its thread does once a second; while that is about it, a look of ours does nothing
        patches = activate.current().patches
        wait_for(lambda: "gemmtuned::shuffled_scaled_mm" in (patches.look_for_foreign() or patches.foreign.seen))

    torch.manual_seed(0)
    w8, wf = torch.randint(-128, 128, (48, 256), dtype=torch.int8), torch.randn(48, 256).to(torch.float8_e4m3fn)
    of_w, bias = torch.rand(48) * 2.0**-6, torch.randn(48).bfloat16()
    blocks = torch.rand(1, 2)

    def both(m, dtype=torch.bfloat16):
        x8, xf = torch.randint(-128, 128, (m, 256), dtype=torch.int8), torch.randn(m, 256).to(torch.float8_e4m3fn)
        of_x, of_blocks = torch.rand(m), torch.rand(m, 2)
        s8, sf = ops.shuffle_weight(w8), ops.shuffle_weight(wf)
        yield ops.gemm_a8w8(x8, w8, of_x, of_w, bias), ops.gemm_a8w8_bpreshuffle(x8, s8, of_x, of_w, bias)
        yield ops.gemm_a8w8(x8, w8, of_x[:1], of_w[:1]), ops.gemm_a8w8_bpreshuffle(x8, s8, of_x[:1], of_w[:1])
        yield ops.gemm_a8w8(xf, wf, of_x, of_w, bias), ops.gemm_a8w8_bpreshuffle(xf, sf, of_x, of_w, bias)
        yield (ops.gemm_a8w8_blockscale(xf, wf, of_blocks, blocks),
               ops.gemm_a8w8_blockscale(xf, sf, of_blocks, blocks, isBpreshuffled=True))
    """


def test_they_are_products_of_the_plain_weight_under_keys_of_their_own(home: Home) -> None:
    done = home.run(
        OPERANDS
        + """
    look()
    same = [torch.equal(*pair) for m in (1, 3, 16, 1025) for pair in both(m)]
    print(json.dumps(same))
    """
    )
    assert done.said == [True] * 16, done
    counts = {key: calls for (key, _), calls in home.counts().items() if "weight=shuffled" in key}
    row = "scaled:i8>bf16:{m}x48x256{bias},scale={scale},weight=shuffled,threads=1"
    int8 = {
        row.format(m=m, bias=bias, scale=scale): 1
        for m in (1, 3, 16) for bias, scale in (("+bias", "row"), ("", "tensor"))
    }  # fmt: skip
    assert int8.items() <= counts.items(), "1025 rows are turned back and counted as those of a plain weight"
    assert len(counts) == 12 and not any(":1025x" in key for key in counts)


def test_what_is_no_tensor_is_refused_by_name(home: Home) -> None:
    done = home.run(
        OPERANDS
        + """
    from gemmtuned.configs.errors import GemmtunedError
    x, s8, one, said = torch.zeros(2, 256, dtype=torch.int8), ops.shuffle_weight(w8), torch.ones(1), []
    for given in (([1], s8, one, one), (x, s8, 1.0, one), (x, s8, one, one, [1.0])):
        try:
            ops.gemm_a8w8_bpreshuffle(*given)
        except GemmtunedError as err:
            said.append(str(err))
    print(json.dumps(said))
    """
    )
    refused = (("x", [1]), ("x_scale", 1.0), ("bias", [1.0]))
    assert done.said == [f"gemm_a8w8: {name} is {given}, expected a tensor" for name, given in refused]


def test_they_are_the_same_below_a_compiler_and_where_nobody_counts(home: Home) -> None:
    code = (
        OPERANDS
        + """
    own.can_be_read = lambda *given, usual=own.can_be_read: seen.append(usual(*given)) or seen[-1]
    seen = []
    x, of_x, s8 = torch.randint(-9, 9, (5, 256), dtype=torch.int8), torch.rand(5), ops.shuffle_weight(w8)
    call = lambda: ops.gemm_a8w8_bpreshuffle(x, s8, of_x, of_w, bias)
    right = ops.gemm_a8w8(x, w8, of_x, of_w, bias)
    said = [torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(), right), torch.equal(call(), right)]
    gemmtuned.disable()
    said += [torch.equal(call(), right)]
    print(json.dumps(said))
    """
    )
    assert home.compiling().run(code).said == [True, True, True]


@pytest.mark.parametrize("m", [3, 40])
def test_operands_that_do_not_fit_are_named(m: int) -> None:
    w = ops.shuffle_weight(torch.zeros(32, 64, dtype=torch.int8))
    x, one = torch.zeros(m, 64, dtype=torch.int8), torch.ones(1)
    with pytest.raises(GemmtunedError, match="x_scale"):
        ops.gemm_a8w8_bpreshuffle(x, w, torch.ones(m + 1), one)
    with pytest.raises(GemmtunedError, match="and WQ torch"):
        ops.gemm_a8w8_bpreshuffle(x.float(), w, one, one)
    with pytest.raises(GemmtunedError, match=r"expected \[\.\., K\]"):
        ops.gemm_a8w8_bpreshuffle(x[:, :32], w, one, one)


def test_a_gpu_without_kernels_of_that_order_has_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, has in (((0, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(own, "capability", lambda index, found=found: found)
        assert own._has_kernels(0) is has and own._has_kernels(-1) is True


def test_many_rows_beside_a_weight_without_tiles_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kinds = torch.zeros(17, 32, dtype=torch.bfloat16), (torch.int8, torch.uint8, torch.float8_e4m3fn)
    weights = [torch.zeros(8, 32, dtype=kind) for kind in (*kinds, torch.float8_e5m2)]
    seen = {}
    for found in ((7, 5), (8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(weight_only, "capability", lambda index, found=found: found)
        seen[found] = [weight_only._has_tiles(x, w) for w in weights]
        assert not weight_only._has_tiles(x.float(), weights[0])
    assert capability(-1) == (0, 0), "of a CPU"
    whole, without_fp8, none = [True, True, True, False], [True, True, False, False], [False] * 4
    assert [*seen.values()] == [none, without_fp8, whole, whole]


SERVED = """
    from importlib.metadata import version
    from gemmtuned.configs.launch import Condition, OperatorLaunch
    from gemmtuned.configs.problem import Problem
    from gemmtuned.hooks import activate
    from hooked import publish, published
    library = torch.library.Library("planted", "DEF")
    library.define("sevens(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, Tensor(a!) y) -> ()")
    def sevens(x, w, scale_x, scale_w, y):
        y.fill_(7)
    library.impl("sevens", sevens, "CPU")
    problem = Problem.parse("scaled:i8>bf16:4x48x256,scale=row,weight=shuffled,threads=1")
    record = OperatorLaunch(
        operator="planted::sevens", schema=str(torch.ops.planted.sevens.default._schema),
        arguments=("x", "w", "scale_x", "scale_w", "y"), package="torch", version=version("torch"),
        conditions=(Condition("w.contiguous", "==", 1),),
    )
    row = published(problem, "planted", stamp=version("torch"), launch=record.text())
    publish(activate.current().settings.config_dir, [row], 1)
    wait_for(lambda: gemmtuned.generation() == 1)
    look()
    x, of_x = torch.ones(4, 256, dtype=torch.int8), torch.ones(4)
    y = ops.gemm_a8w8_bpreshuffle(x, ops.shuffle_weight(w8), of_x, torch.ones(48))
    plain = ops.gemm_a8w8(x, w8, of_x, torch.ones(48))
    print(json.dumps([bool((y == 7).all()), bool((plain == 7).all())]))
    """


def test_a_published_solution_serves_the_shuffled_weight_alone(home: Home) -> None:
    assert home.run(OPERANDS + SERVED).said == [True, False]
