"""What is decided without torch is what the families can make inputs for, and what a worker says: no problem waits."""

from __future__ import annotations

import random
import re
from typing import Any, Final

import pytest

from gemmtuned.configs.errors import CandidateFailed, ProblemError
from gemmtuned.configs.problem import DTYPES, FAMILIES, LAYOUTS, SCALE_LAYOUTS, SCALES, ZERO_POINTS, Problem
from gemmtuned.configs.tunable import can_tune, odd_sizes, why_not
from gemmtuned.kernels.families import family_of, tunable

TUNABLE: Final = {kind: set(tunable(kind)) for kind in ("cpu", "cuda")}
EXPERTS: Final = {"experts": 4, "topk": 2, "inter": 128, "act": "silu_gated"}
CHANGES: Final[dict[str, tuple[Any, ...]]] = {
    "family": FAMILIES, "dtype": tuple(DTYPES), "wdtype": tuple(DTYPES),
    "out_dtype": ("bf16", "fp16", "fp32", "i32", "fp8_e4m3"), "scale": SCALES,
    "wscale": tuple(s for s in SCALES if s not in ZERO_POINTS), "scale_dtype": ("fp32", "e8m0", "bf16"),
    "wscale_dtype": ("fp32", "e8m0", "bf16", "fp16"), "scale_layout": SCALE_LAYOUTS, "wscale_layout": SCALE_LAYOUTS,
    "layout": LAYOUTS, "threads": (0, 2), "weight_state": ("plain", "packed", "shuffled"), "packing": ("", "opaque"),
    "bias": (False, True), "batch": (1, 3), "n": (64, 72, 256), "k": (256, 250, 8, 64), "topk": (2, 5),
    "deterministic": (False, True), "batch_invariant": (False, True), "math_mode": ("ieee", "reduced"),
}  # fmt: skip


def changed(rng: random.Random) -> Problem | None:
    """A problem of a kind that some worker can tune, with up to two columns changed; None: there is no such problem."""
    text = rng.choice(sorted(TUNABLE["cpu"] | TUNABLE["cuda"]))
    found = re.fullmatch(r"(\S+) (\S+)/(\S+)>(\S+) (\S+)/(\S+) (\S+)", text)
    assert found is not None, text
    names = ("family", "dtype", "wdtype", "out_dtype", "scale", "wscale", "weight_state")
    columns: dict[str, Any] = dict(zip(names, found.groups(), strict=True))
    columns |= {"m": 8, "n": 256, "k": 256, "threads": rng.choice((0, 2))}
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice(list(CHANGES))
        columns[name] = rng.choice(CHANGES[name])
    if columns["family"] == "moe":
        columns = {**EXPERTS, **columns}
    else:
        columns = {name: value for name, value in columns.items() if name not in EXPERTS}
    try:
        return Problem(**columns)
    except ProblemError:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_what_can_be_tuned_is_what_a_worker_says_and_a_family_takes(seed: int) -> None:
    rng, seen = random.Random(seed), {True: 0, False: 0}
    for problem in filter(None, (changed(rng) for _ in range(2000))):
        try:
            family_of(problem)
            takes = True
        except CandidateFailed:
            takes = False
        said = problem.operands in TUNABLE["cpu" if problem.threads else "cuda"]
        assert can_tune(problem) == (takes and said), (str(problem), takes, said, why_not(problem))
        assert can_tune(problem) == (not why_not(problem)) == (not why_not(problem.with_m(1)))
        seen[takes and said] += 1
    assert min(seen.values()) > 400


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("weight_only:bf16/i8:8x64x256,wscale=row,layout=nn", "W by rows"),
        ("weight_only:bf16/i4:8x64x200,wscale=1x64,wscaledtype=bf16", "K is no multiple"),
        ("fp4_e2m1:8x64x256", "no operands of fp4_e2m1"), ("batched:fp4_e2m1:2x8x64x256", "no operands of fp4_e2m1"),
        ("grouped:fp4_e2m1:4x8x64x256", "one type of bf16"), ("fp8_e4m3:8x64x256", "no operands of fp8_e4m3"),
        ("bf16:8x64x256,weight=packed,packing=opaque,threads=2", "packed (opaque)"),
        ("bf16:8x64x256,weight=packed", "on CPUs"),
        ("scaled:fp8_e4m3>bf16:8x64x256,scale=1x32", "scales of 1x32"),
        ("scaled:fp8_e4m3>bf16:8x64x256,scale=row,scalelayout=other", "rows or columns"),
        ("scaled:fp8_e4m3>bf16:8x64x256,scale=1x128,threads=2", "blocks on CPUs"),
        ("moe:bf16:8x256x256,layout=nn,experts=4,topk=2,inter=128,act=silu_gated", "layout nt"),
    ],
)  # fmt: skip
def test_the_reason_is_named(text: str, why: str) -> None:
    assert why in why_not(Problem.parse(text))


def test_other_packages_families_are_theirs() -> None:
    theirs = Problem(family="theirs.product", m=8, n=64, k=256)
    assert why_not(theirs) == "" and not can_tune(theirs)


def test_a_scale_of_no_plain_block_is_no_odd_size_but_no_error_either() -> None:
    assert odd_sizes(Problem(m=8, n=64, k=256, wdtype="i4", wscale="1x16+tensor")) == ""
