"""A launch record for given operands: the worker's functions and the native hook's loops say the same, always."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtuned.configs.launch import OPS, SLOTS, Axis, Condition, KernelLaunch
from gemmtuned.configs.launch_values import arguments_of, grid_of, holds, of_operands
from gemmtuned.configs.tensor_maps import ByteMatrix
from gemmtuned.hooks.native import Native
from gemmtuned.hooks.native.build import library_path
from gemmtuned.hooks.native.launches import conditions, kernel_launch
from gemmtuned.hooks.native.structures import Cond

WORDS = ("ptr", "numel", "dim", "contiguous", "size0", "size1", "size2", "stride0", "stride1", "stride2")


@pytest.fixture(scope="module")
def evaluated(native_cache: Path) -> Any:
    path = library_path(native_cache)
    assert path is not None
    hook = Native(path)
    hook._lib.gt_prepare(ctypes.create_string_buffer(500), 500)  # defines the operators; stands in front of none
    return torch.ops.gemmtuned.evaluated


def matrix(rng: random.Random, *shape: int) -> torch.Tensor:
    """With gaps between rows, column-major, broadcast, or dense; aligned or not."""
    room = torch.zeros(4096)
    start = rng.choice((0, 4, 1))
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size + rng.choice((0, 0, 4, 1))
    if rng.random() < 0.3:
        strides[:2] = strides[1::-1]
    if rng.random() < 0.1:
        strides[-1] = 0
    return room.as_strided(shape, list(reversed(strides)), start)


def a_case(rng: random.Random) -> tuple[int, KernelLaunch, dict[str, torch.Tensor | None]]:
    """(rank of the operands, a record, operands by slot as a record has them)."""
    rank = rng.choice((2, 2, 3))
    batch = [rng.choice((1, 3))] * (rank - 2)
    m, n, k = (rng.choice((1, 4, 8, 5)) for _ in range(3))
    operands: dict[str, torch.Tensor | None] = {
        "x": matrix(rng, *batch, m, k), "w": matrix(rng, *batch, n, k), "y": matrix(rng, *batch, m, n),
        "scale_x": matrix(rng, m, 1), "scale_w": matrix(rng, *batch, n, 2),
        "bias": matrix(rng, n) if rng.random() < 0.6 else None, "c": matrix(rng, *batch, m, n),
    }  # fmt: skip
    words = [f"{slot}.{word}" for slot in (*SLOTS, "b", "scale_b") for word in WORDS]
    found: list[Condition] = []
    while len(found) < rng.choice((0, 1, 2, 4)):
        of, op = rng.choice(words), rng.choice(OPS)
        value: int | str = rng.choice((0, 1, 4, 8, 16, 20)) if op != "%" else rng.choice((1, 4, 16, 64))
        if op != "%" and rng.random() < 0.3:
            value = f"{rng.choice(('x', 'w', 'y', 'bias', 'c'))}.size{rng.randrange(3)}"
        if of.endswith("ptr") and op != "%":
            continue
        found.append(Condition(of, op, value))
    passed = [f"{slot}.{word}" for slot in ("x", "w", "c") for word in ("ptr", "size0", "stride1", "stride0")]
    passed = [*rng.sample(passed, 5), "y.ptr", "scale_w.stride0", "bias.ptr?", "partials", "null", "counters"]
    if rank == 2:
        passed += rng.sample(["x.map64", "w.map8", "x.map256", "w.map128"], rng.randrange(3))
    rng.shuffle(passed)
    axes = [Axis(rng.choice(("x.size0", "w.size0", "y.size1", "w.size1")), rng.choice((1, 3, 16))) for _ in range(2)]
    record = KernelLaunch(
        shared=0, threads=32, grid=(axes[0], axes[1], Axis("", 7)), arguments=tuple(passed),
        conditions=tuple(found), partials_offset=64, workspace_bytes=128,
    )  # fmt: skip
    return rank, record, operands


def flat(values: list[Any]) -> list[int]:
    """What the native hook says of them: 0 of None, all five numbers of a map."""
    return [one for value in values for one in (value if isinstance(value, ByteMatrix) else (value or 0,))]


def test_python_and_the_native_hook_agree_on_a_thousand_records(evaluated: Any) -> None:
    rng = random.Random(7)
    seen = {True: 0, False: 0}
    for number in range(1000):
        rank, record, operands = a_case(rng)
        packed = conditions(record.checked, rank)
        launch = kernel_launch(record, 0, rank)
        given = [t.mT if t is not None and s in ("w", "scale_w") else t for s, t in operands.items()]
        by_slot = dict(zip(operands, given, strict=True))
        array = (Cond * len(packed))(*packed)
        native = evaluated(
            [by_slot.get(slot) for slot in SLOTS], ctypes.addressof(array), len(array), ctypes.addressof(launch), 1000
        )

        takes = holds(record.checked, operands)
        seen[takes] += 1
        mine = []
        if takes:
            values = arguments_of(record, operands, partials=1064, counters=1000)
            mine = [*grid_of(record.grid, operands), *flat(values)]
        assert native == mine, (
            number,
            record,
            {s: t is not None and (t.shape, t.stride()) for s, t in operands.items()},
        )
    assert min(seen.values()) > 200  # both ways are tried


def test_a_stride_that_is_never_used_is_not_looked_at() -> None:
    row = torch.zeros(64).as_strided((1, 16), (3, 1))

    assert holds([Condition("x.stride0", "%", 8)], {"x": row})
    assert not holds([Condition("x.stride0", "%", 8)], {"x": torch.zeros(64).as_strided((2, 16), (19, 1))})
    assert not holds([Condition("x.stride2", "==", 1)], {"x": row})  # it has no such dimension
    assert holds([Condition("bias.stride0", "==", 1)], {"x": row, "bias": None})


def test_what_onednn_takes_is_dense() -> None:
    x, w = torch.zeros(4, 16), torch.zeros(8, 16)

    assert holds(of_operands("onednn"), {"x": x, "w": w, "bias": None})
    for wrong in ({"x": torch.zeros(16, 4).t()}, {"w": torch.zeros(8, 32)[:, :16]}, {"bias": torch.zeros(16)[::2]}):
        assert not holds(of_operands("onednn"), {"x": x, "w": w, "bias": None, **wrong})
    assert not holds(of_operands("onednn", but="x"), {"x": x.t(), "w": w.t()}) and holds(
        of_operands("onednn", but="x"), {"x": x.t(), "w": w}
    )
