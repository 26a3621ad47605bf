"""Operators that another package declares for a family of its own: counted, served, and as they were where not."""

from __future__ import annotations

import os
import sys
import types
from collections import UserDict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hooked import Home, publish, published

from gemmtuned.configs import key
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.launch import Condition, OperatorLaunch
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND
from gemmtuned.hooks import declared
from gemmtuned.hooks.declared import Declaration
from gemmtuned.hooks.foreign import ForeignOperators
from gemmtuned.hooks.native.records import pack, unpack

ENTRY_POINTS = "[gemmtuned.operators]\nours = declared_here:OPERATORS\nnobody = never_imported:OPERATORS\n"
MODULE = """
    import torch

    library = torch.library.Library("declared", "DEF")
    library.define("twice(Tensor x, Tensor w, Tensor? bias) -> Tensor")
    library.define("twice.out(Tensor x, Tensor w, *, Tensor(a!) out) -> Tensor(a!)")
    library.define("fast(Tensor x, Tensor w, Tensor? bias) -> Tensor")
    library.define("broken(Tensor x, Tensor w) -> Tensor")
    served = []

    def twice(x, w, bias):
        y = 2 * torch.nn.functional.linear(x, w)
        return y if bias is None else y + bias

    def fast(x, w, bias):
        served.append(tuple(x.shape))
        return twice(x, w, bias)

    library.impl("twice", twice, "CPU")
    library.impl("twice.out", lambda x, w, out: out.copy_(twice(x, w, None)), "CPU")
    library.impl("fast", fast, "CPU")

    @torch.library.custom_op("declared::python", mutates_args=())
    def python(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 7:
            raise ValueError("seven rows")
        return 2 * (x @ w)

    OPERATORS = [
        {"operator": "declared::twice", "family": "declared.twice", "x": "x", "w": "w", "bias": "bias"},
        {"operator": "declared::twice.out", "family": "declared.twice", "x": "x", "w": "w", "y": "out"},
        {"operator": "declared::python", "family": "declared.twice", "x": "x", "w": "w", "form": "kn"},
        {"operator": "declared::broken", "family": "declared.twice", "x": "x", "w": "weight"},
        {"operator": "declared::fast", "family": "twice", "x": "x", "w": "w"},
    ]
"""
PROGRAM = """
    import json, torch, gemmtuned
    import declared_here as d
    assert gemmtuned.ready(20)
    torch.manual_seed(0)
    ops = torch.ops.declared
    x, w, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    want = 2 * (x @ w.t())
    def near(y, w=want):
        assert y.shape == w.shape and torch.allclose(y, w, atol=1e-4), (y, w)
        return y
    near(ops.twice(x, w, None))
    near(ops.twice(x, w, bias), want + bias)          # no solution: by its own kernel
    near(ops.twice(x.view(2, 2, 16), w, None), want.view(2, 2, 8))
    near(ops.twice(x[:, ::2], w[:, ::2], None), 2 * (x[:, ::2] @ w[:, ::2].t()))
    out = torch.empty(4, 8)
    assert near(ops.twice.out(x, w, out=out)) is out
    near(ops.python(x, w.t()))
    near(ops.python(x.requires_grad_(), w.t()).detach())
    x.requires_grad_(False)
    errors = []
    for call in (lambda: ops.python(torch.ones(7, 16), w.t()), lambda: ops.twice(x, w[:, :3], None)):
        try:
            call()
        except Exception as err:
            errors.append(type(err).__name__)
    compiled = torch.compile(lambda a: ops.twice(a, w, None) + 1, backend="eager")
    near(compiled(x), want + 1)
    status = gemmtuned.status()
    print(json.dumps([d.served, sorted(status["engine_operators"]), errors]))
"""


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A folder with an installed package; what PYTHONPATH is with it."""
    import textwrap

    facts = tmp_path / "site" / "declared_here-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: declared-here\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "site" / "declared_here.py").write_text(textwrap.dedent(MODULE))
    return os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[1] / "support")])


def record() -> str:
    return OperatorLaunch(
        operator="declared::fast", schema="declared::fast(Tensor x, Tensor w, Tensor? bias) -> Tensor",
        arguments=("x", "w", "bias"), package="declared-here", version="1.0",
        conditions=(Condition("x.contiguous", "==", 1),),
    ).text()  # fmt: skip


@pytest.mark.long
def test_its_calls_are_counted_and_served_in_every_way_that_they_come(home: Home, package: str) -> None:
    problem = Problem(family="declared.twice", m=4, n=8, k=16, dtype="fp32", threads=2)
    publish(home.path / "configs", [published(problem, "declared", stamp="1.0", launch=record())], generation=3)

    done = home.run(PROGRAM, PYTHONPATH=package)

    served, operators, errors = done.said
    assert served == [[4, 16]] * 6, "as it is, with rows in front, into out=, from Python twice, compiled"
    assert operators == ["declared::python", "declared::twice", "declared::twice.out"]
    assert errors == ["ValueError", "RuntimeError"], "what it raises itself"
    told = "\n".join(done.ours)
    assert "declared::broken are not counted: w is its argument 'weight', which it has not" in told
    assert "family is 'twice', expected package.family" in told and len(done.ours) == 2
    counts = {key: calls for key, calls in home.counts().items() if key[0].startswith("declared.twice")}
    text = "declared.twice:fp32:4x8x16,threads=2"
    assert counts == {
        (text, "exact"): 6,
        (text.replace("16,", "16+bias,"), "miss"): 1,
        ("declared.twice:fp32:4x8x8,layout=ss,threads=2", "miss"): 1,
    }


@pytest.mark.long
def test_a_program_without_the_operator_that_serves_it_has_its_own(home: Home, package: str) -> None:
    problem = Problem(family="declared.twice", m=4, n=8, k=16, dtype="fp32", threads=2)
    rows = [
        published(problem, "declared", stamp="1.0", launch=record().replace("declared::fast", "declared::lost")),
        published(problem.with_m(5), DEFAULT_BACKEND, stamp=torch.__version__),
        published(problem.with_m(6), "torch_swap"),
    ]
    publish(home.path / "configs", rows, generation=3)

    done = home.run(
        PROGRAM.replace("errors = []", "ops.twice(torch.ones(5, 16), w, None); errors = []"),
        PYTHONPATH=package,
    )

    assert done.said[0] == []
    assert {problem for (problem, outcome) in home.counts() if outcome != "miss"} == {str(problem.with_m(5))}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("twice", "declared by str, expected a dict"),
        ({"w": None}, "w is None, expected text"),
        ({"scale": "s"}, "it says 'scale', expected operator, family, x, w"),
        ({"operator": "twice"}, "expected namespace::name"),
        ({"form": "mn"}, "expected nk for W"),
        ({"family": "dense"}, "expected package.family"),
    ],
)
def test_what_is_wrong_with_a_declaration_is_named(wrong: object, what: str) -> None:
    good = {"operator": "a::b", "family": "a.b", "x": "x", "w": "w"}
    assert Declaration(good).form == "nk"
    with pytest.raises(ValueError, match=what):
        Declaration({**good, **wrong} if isinstance(wrong, dict) else wrong)
    with pytest.raises(ValueError, match="it does not say 'w'"):
        Declaration({k: v for k, v in good.items() if k != "w"})


def test_an_operator_that_is_not_what_is_declared_is_left_alone() -> None:
    library = torch.library.Library("declared_badly", "DEF")
    for schema, what in {
        "a(Tensor x, Tensor w, float scale) -> Tensor": "nothing is said of its argument 'scale'",
        "b(Tensor x, float w) -> Tensor": "one of its operands is no tensor",
        "c(Tensor x, Tensor w) -> (Tensor, Tensor)": "does not return one tensor",
        "d(Tensor x, Tensor w) -> ()": "does not return one tensor",
    }.items():
        library.define(schema)
        name = f"declared_badly::{schema[0]}"
        with pytest.raises(ValueError, match=what):
            Declaration({"operator": name, "family": "a.b", "x": "x", "w": "w"}).arguments()
    assert not Declaration({"operator": "declared_badly::e", "family": "a.b", "x": "x", "w": "w"}).is_registered


def test_families_of_others_have_codes_of_their_own_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_others", [])
    one, two = (Problem(family=name, m=1, n=2, k=3) for name in ("a.one", "a.two"))
    assert [key.family_code(p.family) for p in (one, two, one)] == [128, 129, 128]
    assert unpack(pack(two)) == two and unpack(pack(one)) == one
    for number in range(126):
        key.family_code(f"b.f{number}")
    with pytest.raises(ProblemError, match="knows 128 of other packages at most"):
        key.family_code("b.more")


def test_nobody_is_told_that_ours_stands_there_while_it_is_still_put_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ready` asks from the program's thread while the hook's own looks: a call too early would pass uncounted."""
    library = torch.library.Library("declared_between", "DEF")
    library.define("twice(Tensor x, Tensor w) -> Tensor")
    behind = []

    class Asked(UserDict[str, str]):
        """The declaration, whose reader asks what another thread would ask at that moment."""

        def keys(self):  # type: ignore[no-untyped-def]
            behind.append(operators.is_behind())
            return super().keys()

    class Native:
        def stand_before(self, *_: object) -> list[str]:
            behind.append(operators.is_behind())
            return ["CPU declared_between::twice"]

        def watch(self, _: object) -> None: ...

    module = types.ModuleType("declared_between")
    module.OPERATORS = (  # type: ignore[attr-defined]
        Asked(operator="declared_between::twice", family="declared.between", x="x", w="w"),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = EntryPoint("between", "declared_between:OPERATORS", declared.GROUP)
    monkeypatch.setattr(declared, "entry_points", lambda group: [point])
    operators = ForeignOperators(())
    before = operators.is_behind()
    operators.look(cast("Any", Native()))

    assert before and len(behind) >= 2 and all(behind)
    assert not operators.is_behind() and operators.seen == ["declared_between::twice"]
