"""What the library is told of a problem: types, layouts, batches, scales; by a stand-in for it that takes notes.

The numbers are those of cublasLt.h (CUDA 12.9 and 13); the library itself needs a GPU (tests/gpu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels import cublaslt
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends import cublaslt as backend
from gemmtuned.kernels.families import family_of

TRANS_A, TRANS_B, EPILOGUE, BIAS, SCALE_A, SCALE_B, FAST, MODE_A, MODE_B = 3, 4, 7, 8, 17, 18, 25, 31, 32
E4M3, E5M2, FP32, BF16, I8, I32 = 28, 29, 0, 14, 3, 10
CPU = torch.device("cpu")


class Library:
    """Handles are numbers; by them, what was said of a descriptor or a layout."""

    def __init__(self) -> None:
        self.made: dict[int, dict[Any, Any]] = {}
        self.asked: list[dict[str, Any]] = []

    def _make(self, out: Any, **facts: Any) -> int:
        out._obj.value = len(self.made) + 1
        self.made[out._obj.value] = facts
        return 0

    def cublasLtGetVersion(self) -> int:
        return 130100

    def cublasLtCreate(self, out: Any) -> int:
        return self._make(out)

    def cublasLtMatmulDescCreate(self, out: Any, compute: Any, scale: Any) -> int:
        return self._make(out, compute=compute.value, scale=scale.value)

    def cublasLtMatrixLayoutCreate(self, out: Any, kind: Any, rows: Any, columns: Any, leading: Any) -> int:
        return self._make(out, type=kind.value, rows=rows.value, columns=columns.value, leading=leading.value)

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:
        return self._make(out)

    def _set(self, of: Any, which: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.made[of.value][which] = value._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatrixLayoutSetAttribute = _set
    cublasLtMatmulPreferenceSetAttribute = _set

    def _destroy(self, of: Any) -> int:
        self.made[of.value]["destroyed"] = True
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, desc: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, most: int, out: Any, count: Any
    ) -> int:
        self.asked.append({k: self.made[v.value] for k, v in {"desc": desc, "a": a, "b": b, "c": c, "d": d}.items()})
        count._obj.value = 1
        out[0].algo[0] = 66
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algo: Any, which: int, out: Any, size: Any, written: Any) -> int:
        out._obj.value = 7
        return 0

    def cublasLtMatmulAlgoCheck(
        self, handle: Any, desc: Any, a: Any, b: Any, c: Any, d: Any, algo: Any, out: Any
    ) -> int:
        out._obj.workspace_bytes = 64
        return 0

    def cublasLtMatmul(
        self, handle: Any, desc: Any, alpha: Any, w: Any, a: Any, x: Any, b: Any, beta: Any, added: Any, c: Any, y: Any,
        d: Any, *rest: Any,
    ) -> int:  # fmt: skip
        told = {k: dict(self.made[v.value]) for k, v in {"desc": desc, "a": a, "b": b, "c": c, "d": d}.items()}
        at = {"w": w.value, "x": x.value, "added": added.value, "y": y.value}
        numbers = {"alpha": alpha._obj.value, "beta": beta._obj.value, "number": type(beta._obj)}
        self.asked.append(told | at | numbers)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 5}))
    monkeypatch.setattr(backend, "_known", {})
    for cache in (cublaslt._handle, backend._algorithms):
        cache.cache_clear()
    yield found
    for cache in (cublaslt._handle, backend._algorithms):
        cache.cache_clear()


def called(library: Library, problem: Problem) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(what the library was told in a call, the operands) of the first candidate for this problem."""
    candidate = next(iter(BACKENDS["cublaslt"].candidates(problem)))
    inputs = family_of(problem).make(problem, kind="randn", seed=1, device=CPU)
    y = inputs.run(BACKENDS["cublaslt"].prepare(candidate, problem))
    said = library.asked[-1]
    assert said["y"] == y.data_ptr() and said["x"] == inputs["x"].data_ptr() and said["w"] == inputs["w"].data_ptr()
    left = [facts for facts in library.made.values() if facts and not facts.get("destroyed")]
    assert left == [], "descriptors are destroyed after every call"
    return said, inputs.tensors


@pytest.mark.parametrize(
    ("scale", "wscale", "x_mode", "w_mode"),
    [("tensor", "tensor", None, None), ("row", "row", 3, 3), ("1x128", "128x128", 4, 5), ("1x128", "1x128", 4, 4)],
)
@pytest.mark.parametrize("fast", [False, True])
def test_scales_are_told_by_their_modes_and_operands_change_places(
    library: Library, scale: str, wscale: str, x_mode: int | None, w_mode: int | None, fast: bool
) -> None:
    problem = Problem(
        family="scaled", m=16, n=256, k=512, dtype="fp8_e4m3", wdtype="fp8_e5m2", out_dtype="bf16", bias=True,
        scale=scale, wscale=wscale, scale_layout="col", wscale_layout="col" if wscale == "1x128" else "row",
        math_mode="reduced" if fast else "ieee",
    )  # fmt: skip
    said, operands = called(library, problem)
    desc = said["desc"]
    assert (desc["compute"], desc["scale"], desc[TRANS_A], desc[TRANS_B]) == (68, 0, 1, 0)
    assert (desc.get(MODE_A), desc.get(MODE_B), desc.get(FAST)) == (w_mode, x_mode, 1 if fast else None)
    assert (desc[SCALE_A], desc[SCALE_B]) == (operands["scale_w"].data_ptr(), operands["scale_x"].data_ptr())
    assert (desc[EPILOGUE], desc[BIAS]) == (4, operands["bias"].data_ptr())
    facts = ("type", "rows", "columns", "leading")
    assert [said["a"][x] for x in facts] == [E5M2, 512, 256, 512]
    assert [said["b"][x] for x in facts] == [E4M3, 512, 16, 512]
    assert [said["d"][x] for x in facts] == [BF16, 256, 16, 256] and said["beta"] == 0
    first = library.asked[0]["desc"]  # the library names algorithms for the modes that it is told of before
    assert (first.get(MODE_A), first.get(MODE_B), first[SCALE_A] % 16) == (w_mode, x_mode, 0)


def test_a_full_c_is_added_in_the_call(library: Library) -> None:
    said, operands = called(library, Problem(family="dense_add", m=16, n=64, k=32, dtype="bf16", math_mode="reduced"))
    assert (said["beta"], said["c"]["rows"], said["c"]["leading"]) == (1, 64, 64)
    assert said["desc"].get(EPILOGUE) is None and said["added"] == operands["c"].data_ptr()
    inputs = family_of(problem := Problem(family="dense_add", m=16, n=64, k=32, dtype="bf16")).make(
        problem, kind="padded", seed=1, device=CPU
    )
    candidate = next(iter(BACKENDS["cublaslt"].candidates(problem)))
    y = inputs.run(BACKENDS["cublaslt"].prepare(candidate, problem))
    assert torch.equal(y, torch.addmm(inputs["c"], inputs["x"], inputs["w"])), "what lies otherwise is torch's"


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_products_of_a_batch_are_told_how_far_apart_they_lie(library: Library, layout: str) -> None:
    problem = Problem(family="batched", batch=3, m=16, n=64, k=32, dtype="fp32", layout=layout)
    said, _ = called(library, problem)
    assert [said[name][5] for name in "abd"] == [3, 3, 3]
    assert [said[name][6] for name in "abd"] == [64 * 32, 16 * 32, 16 * 64]
    inputs = family_of(problem).make(problem, kind="randn", seed=1, device=CPU)
    wide = torch.zeros(3, 20, 32) if layout[0] == "n" else torch.zeros(3, 40, 16).mT
    x = wide[:, : problem.m, : problem.k].copy_(inputs["x"])
    inputs.having(x=x).run(BACKENDS["cublaslt"].prepare(next(iter(BACKENDS["cublaslt"].candidates(problem))), problem))
    assert library.asked[-1]["b"][6] == x.stride(0)


def test_a_result_may_be_wider_than_operands(library: Library) -> None:
    said, _ = called(library, Problem(family="batched", batch=3, m=16, n=64, k=32, dtype="bf16", out_dtype="fp32"))
    assert [said[name]["type"] for name in "abcd"] == [BF16, BF16, FP32, FP32]


def test_products_of_integers_are_added_up_and_scaled_in_integers(library: Library) -> None:
    problem = Problem(m=32, n=64, k=48, dtype="i8", out_dtype="i32", deterministic=True)
    said, _ = called(library, problem)
    assert (said["desc"]["compute"], said["desc"]["scale"]) == (72, I32)
    assert (said["desc"][TRANS_A], said["desc"][TRANS_B]) == (1, 0), "the one form that the library has for int8"
    assert [said[name]["type"] for name in "abcd"] == [I8, I8, I32, I32]
    assert (said["alpha"], said["beta"], said["number"]) == (1, 0, ctypes.c_int32)
    masks = {facts[3] for facts in library.made.values() if 3 in facts and 1 in facts}
    assert masks == {0, 1, 2, 4, 7}, "in whatever order: no sum is rounded"


def test_reductions_in_fewer_bits_are_not_what_fast_sums_allow(library: Library) -> None:
    fast = Problem(
        family="scaled", m=16, n=256, k=512, dtype="fp8_e4m3", out_dtype="bf16", scale="row", math_mode="reduced"
    )
    cublaslt.algorithms(fast)
    masks = {facts[3] for facts in library.made.values() if 3 in facts and 1 in facts}
    assert masks == {0, 2}, "none at all, or in fp32"


@pytest.mark.parametrize(
    "problem",
    [
        Problem(family="scaled", m=16, n=32, k=64, dtype="fp8_e4m3", out_dtype="bf16", scale="row", layout="nn"),
        Problem(family="scaled", m=16, n=32, k=64, dtype="fp8_e4m3", out_dtype="bf16", scale="1x32"),
        Problem(family="scaled", m=16, n=256, k=512, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128"),
        Problem(
            family="scaled", m=16, n=256, k=640, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128", scale_layout="col"
        ),
        Problem(m=16, n=32, k=64, dtype="bf16", out_dtype="fp16"),
        Problem(m=16, n=32, k=64, dtype="bf16", threads=2),
        Problem(family="grouped", batch=2, m=16, n=32, k=64, dtype="bf16"),
        Problem(m=32, n=32, k=64, dtype="i8"),
        Problem(m=32, n=32, k=64, dtype="i8", out_dtype="i32", bias=True),
        Problem(family="batched", batch=2, m=32, n=32, k=64, dtype="i8", out_dtype="i32"),
    ],
    ids=str,
)
def test_the_library_is_not_asked_for_what_it_has_not(library: Library, problem: Problem) -> None:
    with pytest.raises(CandidateFailed, match=r"cuBLASLt (is asked for|reads scales of blocks)"):
        cublaslt.algorithms(problem)
    assert list(BACKENDS["cublaslt"].candidates(problem)) == [] and library.asked == []
