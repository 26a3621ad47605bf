"""torch._int_mm of programs: what is published serves it, bit for bit, and everything else stays torch's."""

from __future__ import annotations

import pytest
from hooked import Home, publish, published

from gemmtuned.configs.problem import Problem

PROBLEM = Problem(m=20, n=24, k=40, dtype="i8", out_dtype="i32", threads=2)
PROGRAM = """
    import itertools, json, torch, gemmtuned
    from gemmtuned.hooks import activate
    hook = activate.current()
    hook.flusher.stop()
    assert gemmtuned.ready(20)
    torch.manual_seed(0)

    def drawn(*shape):
        return torch.randint(-128, 128, shape, dtype=torch.int8)

    def exact(x, w):
        return (x.long()[:, :, None] * w.long()).sum(1).to(torch.int32)  # no GEMM

    def outcomes():
        return sorted(f"{s.problem} {s.outcome} {s.calls}" for s in hook.native.drain())
"""


def test_a_published_row_serves_both_forms_bit_for_bit(home: Home) -> None:
    publish(home.path / "configs", [published(PROBLEM, "torch_swap")], generation=1)
    done = home.compiling().run(
        PROGRAM
        + """
    x, w = drawn(20, 40), drawn(24, 40)
    want, said = exact(x, w.t()), []
    y = torch._int_mm(x, w.t())
    out = torch.empty(20, 24, dtype=torch.int32)
    given = torch._int_mm(x, w.t(), out=out)
    turned = torch.empty(24, 20, dtype=torch.int32).t()
    torch._int_mm(x, w.t(), out=turned)
    said.append([torch.equal(y, want), torch.equal(out, want), given is out, torch.equal(turned, want),
                 y.dtype == torch.int32, y.stride(), turned.stride()])
    said.append(outcomes())
    w.neg_(), x.add_(3)  # the memory is read anew
    said.append(torch.equal(torch._int_mm(x, w.t()), exact(x, w.t())))
    compiled = torch.compile(lambda a, b: torch._int_mm(a, b) + 1, backend="aot_eager")
    said.append([torch.equal(compiled(x, w.t()), exact(x, w.t()) + 1), outcomes(), hook.native.failures()])
    print(json.dumps(said))
    """
    )
    forms, first, edited, compiled = done.said
    assert forms == [True] * 5 + [[24, 1], [1, 20]]
    assert first == [f"{PROBLEM} exact 3"]
    assert edited is True and compiled == [True, [f"{PROBLEM} exact 2"], []]


def test_a_side_of_one_element_may_have_any_stride(home: Home) -> None:
    rows = [
        Problem(m=m, n=n, k=k, dtype="i8", out_dtype="i32", threads=2, layout=layout)
        for m, n, k in ((1, 24, 40), (5, 1, 40), (1, 1, 40), (5, 24, 1)) for layout in ("nt", "nn", "tn", "tt")
    ]  # fmt: skip
    publish(home.path / "configs", [published(p, "torch_swap") for p in rows], generation=1)
    done = home.run(
        PROGRAM
        + """
    def lying(values, strides):
        room = sum((size - 1) * step for size, step in zip(values.shape, strides)) + 1
        return torch.zeros(room, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)

    def strides(rows, columns):
        return [(columns, 1), (columns + 3, 1), (1, rows), (1, rows + 3), *([(1, 1)] if 1 in (rows, columns) else [])]

    wrong = []
    for m, n, k in ((1, 24, 40), (5, 1, 40), (1, 1, 40), (5, 24, 1)):
        x, w = drawn(m, k), drawn(k, n)
        for of_x, of_w in itertools.product(strides(m, k), strides(k, n)):
            y = torch._int_mm(lying(x, of_x), lying(w, of_w))
            if not torch.equal(y, exact(x, w)) or y.stride() != (n, 1):
                wrong.append([m, n, k, of_x, of_w])
    seen = {s.outcome for s in hook.native.drain()}
    print(json.dumps([wrong, sorted(seen), hook.native.failures()]))
    """
    )
    assert done.said == [[], ["exact"], []]


def test_operands_that_lie_over_themselves_are_torchs(home: Home) -> None:
    """One number as a whole row, say: their keys are those of others, and oneDNN reads them as something else."""
    rows = [
        Problem(m=m, n=n, k=k, dtype="i8", out_dtype="i32", threads=2, layout=layout)
        for m, n, k, layout in ((1, 5, 16, "tn"), (1, 5, 16, "tt"), (1, 17, 3, "tn"))
    ]
    publish(home.path / "configs", [published(p, "torch_swap") for p in rows], generation=1)
    done = home.run(
        PROGRAM
        + """
    one, step = drawn(1, 16)[:, :1], drawn(1, 6)
    calls = [(one.expand(1, 16), drawn(16, 5)), (one.expand(1, 16), drawn(5, 16).t()),
             (step[:, ::2], drawn(40)[:21].as_strided((3, 17), (2, 1)))]
    same = [torch.equal(torch._int_mm(x, w), exact(x, w)) for x, w in calls]
    print(json.dumps([same, outcomes(), hook.native.failures()]))
    """
    )
    same, seen, failures = done.said
    assert same == [True] * 3 and failures == []
    assert seen == sorted(f"{p} miss 1" for p in rows)


def test_what_torch_refuses_or_is_another_problem_is_torchs(home: Home) -> None:
    publish(home.path / "configs", [published(PROBLEM, "torch_swap")], generation=1)
    done = home.run(
        PROGRAM
        + """
    x, w, said = drawn(20, 40), drawn(24, 40), []
    for a, b, more in ((x, w.t().to(torch.uint8), {}), (x.float(), w.t(), {}), (x, w, {}), (x[None], w.t()[None], {}),
                       (x, w.t(), dict(out=torch.empty(20, 24))), (x, w.t(), dict(out=torch.empty(3, 3).int()))):
        try:
            torch._int_mm(a, b, **more)
        except RuntimeError as err:
            said.append(str(err).splitlines()[0][:20])
    hook.native.drain()
    other = [torch.mm(x, w.t()).dtype == torch.int8, torch._int_mm(x[:3], w.t()).shape == (3, 24)]
    print(json.dumps([len(said), other, outcomes(), hook.native.failures()]))
    """
    )
    refused, other, seen, failures = done.said
    assert refused >= 5 and other == [True, True] and failures == []
    assert seen == ["i8:20x24x40,threads=2 miss 1", "i8>i32:3x24x40,threads=2 miss 1"]


def test_sums_of_integers_are_the_same_in_every_batch_so_that_no_chain_is_asked_for(home: Home) -> None:
    """A program that wants rows of the same bits in every batch has its calls counted as what they are."""
    done = home.run(
        PROGRAM.replace("    assert gemmtuned.ready(20)\n", "")
        + """
    x, w = drawn(20, 40), drawn(24, 40)
    torch._int_mm(x, w.t()), torch.mm(x.float(), w.t().float())
    print(json.dumps(outcomes()))
    """,
        GEMMTUNED_BATCH_INVARIANT="1",
    )
    assert done.said == ["fp32:256x24x40,invariant=1,threads=2 miss 1", f"{PROBLEM} miss 1"]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_live_check_finds_one_number_that_is_not_torchs(home: Home, wrong: bool) -> None:
    """The operator stands for a kernel that is wrong rarely: it is off by one in one place."""
    publish(home.path / "configs", [], generation=1)
    done = home.run(
        f"    wrong = {wrong}\n"
        + PROGRAM
        + """
    from gemmtuned.configs.launch import OperatorLaunch
    from gemmtuned.configs.problem import Problem
    from gemmtuned.hooks import native
    from gemmtuned.hooks.native import launches

    library = torch.library.Library("outside_ints", "DEF")
    library.define("product(Tensor x, Tensor w) -> Tensor")

    def product(x, w):
        y = exact(x, w.t())
        y[-1, -1] += wrong
        return y

    library.impl("product", product, "CPU")
    op = torch.ops.outside_ints.product.default
    record = OperatorLaunch(operator="outside_ints::product", schema=str(op._schema), arguments=("x", "w"),
                            package="torch", version="1")
    problem = Problem(m=20, n=24, k=40, dtype="i8", out_dtype="i32", threads=2)
    row = native.Row(problem, "exact", "eager", 7, 7, "cpu", launches.operator_call(record),
                     launches.conditions(record.checked, 2))
    hook.native.load([row], 2)
    x, w = drawn(20, 40), drawn(24, 40)
    right = [torch.equal(torch._int_mm(x, w.t()), exact(x, w.t())) for _ in range(2)]
    print(json.dumps([right, outcomes(), [reason for *_, reason in hook.native.failures()]]))
    """,
        GEMMTUNED_LIVE_CHECK="1",
    )
    right, seen, failures = done.said
    assert right == [True, True]
    assert seen == [f"{PROBLEM} {'miss' if wrong else 'exact'} 2"]
    assert failures == (["live check: 1 of 480 whole numbers are not torch's"] if wrong else [])
