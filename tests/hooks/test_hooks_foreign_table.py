"""The table of other packages' operators: each is counted under its own problem."""

from __future__ import annotations

import pytest
import torch
from engine_programs import STAND_INS
from hooked import Home

from gemmtuned.configs.engine_races import ENGINES
from gemmtuned.hooks.engine_operators import operators

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="torch 2.9 has no way to the kernel beneath"
)


EXACT = [operator for operator in operators() if operator.is_exact]


def test_the_table_names_arguments_that_its_schemas_have() -> None:
    for operator in EXACT:
        y, x, *_ = operator.arguments
        assert x >= 0
        named = {"weights": (2, 4), "kn": (2, 3, 4), "shuffled": (2, 3, 4), "nk": (2, 3, 4)}.get(
            operator.form, ()
        )  # w, scale_x, scale_w
        assert all(operator.arguments[i] >= 0 for i in named)
        assert y >= 0 or operator.schema.endswith("-> (Tensor)")
        assert not operator.routed or operator.name.startswith("gemmtuned::") or operator.name in ENGINES
    assert len({operator.name for operator in operators()}) == len(operators())
    numbered = {operator.engine: operator.name for operator in operators() if operator.engine}
    assert numbered == dict(enumerate(ENGINES, 1))


@pytest.mark.parametrize("operator", EXACT, ids=lambda operator: operator.name)
def test_schemas_are_spelled_as_torch_spells_them(operator: object) -> None:
    import torch

    schema = torch._C.parse_schema(operator.schema)  # type: ignore[attr-defined]
    assert [a.name for a in schema.arguments]


def test_every_operator_of_the_table_is_counted_under_its_own_problem(home: Home) -> None:
    """Stand-ins that Python registered, with the table's schemas: counts, values and keys."""
    done = home.run(
        STAND_INS
        + """
    story = []
    for one in operators():
        text = one.schema if one.is_exact else one.name + "(Tensor a, Tensor sfa, Tensor d, int[3]? recipe=None) -> ()"
        space, _, rest = text.partition("::")
        names = [tuple(part.split()[:2]) for part in rest[rest.index("(") + 1:rest.index(") ->")].split(", ")]
        names = [(kind.replace("int[3]", "int[]"), name.partition("=")[0]) for kind, name in names]
        fragment(space).define(rest.replace(f"Tensor {one.y},", f"Tensor! {one.y},") if one.y else rest)
        short = rest.partition("(")[0]
        fragment(space).impl(short, stand_in(one, names), "CPU")
        hook.patches.look_for_foreign()
        list(hook.native.drain())
        given = operands(one, names)
        made = [getattr(getattr(torch.ops, space), short)(*given) for _ in range(3)]
        y = given[[name for _, name in names].index(one.y)] if one.y else made[0]
        counted = [[str(s.problem), s.calls] for s in hook.native.drain()]
        story.append([one.name, "zero points" if one.sums_w else one.form, y.unique().tolist(), counted])
    print(json.dumps([story, hook.patches.foreign.changed]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    story, changed = done.said

    assert changed == {}
    assert len(story) == len(operators())
    for name, form, values, counted in story:
        assert values == [2.0], name
        [[problem, calls]] = counted
        assert calls == 3, name
        shape = "3x4x128x256" if form == "opaque batched" else "4x128x256"
        family = {"opaque batched": "batched", "opaque": "dense", "weights": "weight_only"}.get(form, "scaled")
        assert problem.startswith(f"{family}:" if family != "dense" else "bf16:"), (name, problem)
        assert f":{shape}," in problem, (name, problem)
        said = {"scaled": "scale=1x32" if form == "pairs" else "scale=1x128", "weight_only": "wscale=128x128"}.get(
            family, "packing=opaque"
        )
        assert ("scale=row+zero" if form == "zero points" else said) in problem, (name, problem)


def test_what_is_no_scaled_product_of_ours_is_counted_as_opaque(home: Home) -> None:
    """Scales in another type or form than we have a name for: never the key of another product."""
    done = home.run(
        STAND_INS
        + """
    one = next(one for one in operators() if one.name == "vllm::fp8_gemm_nt_op")
    fragment("vllm").define(one.schema.partition("::")[2].replace("Tensor output", "Tensor! output"))
    fragment("vllm").impl("fp8_gemm_nt_op", lambda q, qs, w, ws, y, e8m0: None, "CPU")
    hook.patches.look_for_foreign()
    list(hook.native.drain())
    x, w, y = torch.ones(m, k).to(fp8), torch.ones(n, k).to(fp8), torch.zeros(m, n, dtype=bf16)
    scales = [(torch.ones(m, 2), torch.ones(1, 2)), (torch.ones(m, 1, dtype=torch.int32), torch.ones(n, 1).int()),
              (torch.ones(2, m).t(), torch.ones(1, 2)), (torch.ones(2, m), torch.ones(1, 2)),
              (torch.ones(m * 2), torch.ones(1, 2)), (torch.ones(m, 4), torch.ones(1, 4))]
    found = []
    for sx, sw in scales:
        torch.ops.vllm.fp8_gemm_nt_op(x, sx, w, sw, y, False)
        found += [str(s.problem) for s in hook.native.drain()]
    print(json.dumps(found))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    kinds = ["opaque" if "packing=opaque" in problem else problem.partition("scale=")[2] for problem in done.said]

    assert [kind.startswith("1x128") for kind in kinds] == [True, False, True, False, False, False], done.said
    assert kinds[0] != kinds[2], "one by row, one by column"
    assert [kind for kind in kinds if not kind.startswith("1x128")] == ["opaque"] * 4
