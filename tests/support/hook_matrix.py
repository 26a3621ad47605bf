"""Run every program of gemm_programs.py on stock torch, then captured, then with each backend's routes.

One process for all, so that torch is imported once.  Printed: {phase: {program: {...}}}.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from gemm_programs import PROGRAMS
from hooked import publish, published
from torch.utils._pytree import tree_flatten

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks import activate
from gemmtuned.kernels.backends import BACKENDS

TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4}


def main() -> None:
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    # twice: what a first call builds (oneDNN primitives, profiled traces) may choose another path than the second
    stock = {name: (attempt(name), attempt(name))[1] for name in PROGRAMS}
    gemmtuned.enable()
    hook = activate.current()
    assert hook is not None and hook.path == "native", hook and hook.note
    hook.stop()  # this process drains by itself
    said: dict[str, Any] = {"captured": {}}
    seen: set[Problem] = set()
    for name in PROGRAMS:
        said["captured"][name] = compare(name, stock[name], bits=PROGRAMS[name].exact, seen=seen)
    for generation, backend in enumerate(("torch_swap", "torch_mv", "onednn"), 1):
        rows = [published(p, backend) for p in seen if tuple(BACKENDS[backend].candidates(p))]
        publish(hook.settings.config_dir, rows, generation)
        assert gemmtuned.reload() == generation
        said[backend] = {name: compare(name, stock[name], bits=False, seen=set()) for name in PROGRAMS}
    said["failures"] = [reason for _, _, reason in hook.native.failures()] if hook.native else []
    Path(sys.argv[1]).write_text(json.dumps(said))


def attempt(name: str) -> Any:
    torch.manual_seed(0)
    try:
        return PROGRAMS[name].run()
    except Exception as err:
        return f"{type(err).__name__}: {err}"


def compare(name: str, stock: Any, *, bits: bool, seen: set[Problem]) -> dict[str, Any]:
    hook = activate.current()
    assert hook is not None and hook.native is not None
    list(hook.native.drain())
    found = attempt(name)
    counts: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    for s in hook.native.drain():
        seen.add(s.problem)
        spelled = str(s.problem).replace(",threads=2", "")
        counts[spelled] = counts.get(spelled, 0) + s.calls
        outcomes[s.outcome] = outcomes.get(s.outcome, 0) + s.calls
    return {"counts": counts, "outcomes": outcomes, "differs": difference(stock, found, bits=bits)}


def difference(stock: Any, found: Any, *, bits: bool) -> str:
    ours, theirs = tree_flatten(found)[0], tree_flatten(stock)[0]
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b:
                return f"result {i}: {a!r}, not {b!r}"
            continue
        facts_a, facts_b = [(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in (a, b)]
        if facts_a != facts_b:
            return f"result {i}: {facts_a}, not {facts_b}"
        limit = 0.0 if bits else TOLERANCE.get(a.dtype, 0.0)
        if not torch.allclose(a.detach(), b.detach(), rtol=limit, atol=limit, equal_nan=True):
            return f"result {i}: off by {(a.detach().double() - b.detach().double()).abs().max():g}"
    return ""


if __name__ == "__main__":
    main()
