"""What torch's compiler is asked, and that who never compiles never imports it."""

from __future__ import annotations

from pathlib import Path

import torch
from hooked import Home

import gemmtuned
from gemmtuned.kernels.compiling import asked_once, is_exporting

ROOT = Path(gemmtuned.__file__).resolve().parent.parent


class Asks(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 if is_exporting() else x + 1


def test_only_an_export_is_one() -> None:
    """GPU tests of compiled ops hold it on torch 2.11, whose own answer is True in all compiled code."""
    x = torch.zeros(1)
    assert Asks()(x).item() == 1
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(x).item() == 1
    for strict in (False, True):
        assert torch.export.export(Asks(), (x,), strict=strict).module()(x).item() == 2


def test_what_is_asked_once_runs_while_code_is_compiled_and_not_in_it() -> None:
    asked = []

    @asked_once
    def answer() -> int:
        asked.append(1)
        return 3

    compiled = torch.compile(lambda x: x * answer(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [3, 3, 3]
    assert len(asked) == 1


def test_the_ops_bring_no_compiler(home: Home) -> None:
    """To a process that has torch."""
    compilers = "print(json.dumps([m for m in ('torch._dynamo', 'sympy') if m in sys.modules]))"
    code = f"import json, sys, torch; {compilers}; import gemmtuned.ops; {compilers}"
    done = home.run(code, AITER_TUNE_GEMM="0")
    assert done.code == 0 and done.out.split() == ["[]", "[]"], done.err


def test_nothing_of_ours_asks_torch_itself() -> None:
    sources = [p for folder in ("gemmtuned", "hooks", "kernels", "daemon") for p in (ROOT / folder).rglob("*.py")]
    asks = {p.name for p in sources if "torch.compiler.is_exporting()" in p.read_text(encoding="utf-8")}
    assert asks == {"compiling.py"}
