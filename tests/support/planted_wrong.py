"""Kernels that are wrong in ways that are hard to see, and kernels that are right in ways that look wrong.

WRONG: one kernel for each way, by kind; none may ever be published.  Each has a problem of its own, by which the
search of planted_worker.py finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from planted_base import Counted, CountedByClosure, Wrong, _call
from planted_stateful import (
    AfterPause,
    ByVersion,
    KeepsBias,
    KeepsWeight,
    KeepsX,
    ResultByInputs,
    Ring,
    WeightByAddress,
    WeightByFingerprint,
    WhereOneLay,
    WhileOthersLive,
    XByAddress,
    after_time,
    by_chance,
    by_default_dtype,
    every,
    from_call,
    lies_in,
    lose_row,
    nan_one,
    repeats_from,
    scales_weight_meanwhile,
    spoils_weight_seldom,
    spoilt_if,
    storage,
    writes_beside,
    writes_operand,
    zero_one,
)
from planted_values import (
    CurrentWeight,
    NotReentrant,
    OldRows,
    OneThreads,
    RoomOfFirst,
    SharedScratch,
    adds_to_unwritten,
    as_fp16_pair,
    as_if_contiguous,
    beyond,
    by_row_maximum,
    by_way_of,
    counted_twice,
    cut_bits,
    dropped_k,
    finite,
    flushed,
    from_even_addresses,
    hides_nan_of_unwritten,
    if_all,
    last_column_lost,
    last_row_lost_if_odd,
    middle_row_if_ragged,
    nan_but_in_first_row,
    nan_in_first_row_only,
    negative_zero_as_one,
    no_nan,
    on_bias,
    on_w,
    on_x,
    on_y,
    reads_beside,
    rounded_partials,
    rows_that_begin_alike,
    saturating_fp16,
    skips_zero_rows,
    truncated,
    unwritten_row,
    wrong_at,
    wrong_strides,
)

from gemmtuned.configs.problem import Problem

_KINDS: dict[str, dict[str, Callable[[], Any]]] = {
    "late": {
        "zeros from call 1000 on": lambda: Counted(from_call(1000, 0.0)),
        "nan from call 500 on": lambda: Counted(from_call(500, math.nan)),
        "zeros from call 300 of a closure on": lambda: CountedByClosure(from_call(300, 0.0)),
        "the result before from call 700 on": repeats_from(700),
        "the other sign after a quarter of a second": lambda: after_time(0.25),
        "zeros in its first call only": lambda: Counted(lambda y, call: y.zero_() if call == 1 else None),
    },
    "rare": {
        "every 50th": lambda: Counted(every(50)),
        "every 50th at 1 gflop": lambda: Counted(every(50)),
        "one in 50 by chance": lambda: by_chance(1 / 50),
        "one in 300 by chance": lambda: by_chance(1 / 300),
        "one zero in every 1000th": lambda: Counted(every(1000, zero_one)),
        "a row lost in every 97th": lambda: Counted(every(97, lose_row)),
        "nan in every 128th of a closure": lambda: CountedByClosure(every(128, nan_one)),
    },
    "stale": {
        "weight copied": KeepsWeight,
        "weight by address": WeightByAddress,
        "weight by a few elements": WeightByFingerprint,
        "x by address, one": lambda: XByAddress(1),
        "x by address, many": lambda: XByAddress(1000),
        "first x held": KeepsX,
        "first bias copied": lambda: KeepsBias(copy=True),
        "first bias held": lambda: KeepsBias(copy=False),
        "result by address of x": ResultByInputs,
        "x by address and version": lambda: ByVersion(weight=False),
        "weight by address and version": lambda: ByVersion(weight=True),
    },
    "aliasing": {
        "one result": lambda: Ring(1),
        "ring of 4 results": lambda: Ring(4),
        "ring of 50 results": lambda: Ring(50),
        "writes x": _call(writes_operand),
        "writes beside x": _call(writes_beside),
        "writes the weight seldom": _call(spoils_weight_seldom),
    },
    "special": {
        "nan of x lost": _call(on_x(no_nan)),
        "nan of x lost but in row 0": _call(on_x(nan_in_first_row_only)),
        "nan of x lost in row 0": _call(on_x(nan_but_in_first_row)),
        "nan of w lost": _call(on_w(no_nan)),
        "nan of bias lost": _call(on_bias(no_nan)),
        "inf made finite": _call(on_y(finite)),
        "nan for a zero row": _call(on_x(by_row_maximum)),
        "zero rows skipped": _call(skips_zero_rows),
        "negative zero is one": _call(on_x(negative_zero_as_one)),
        "bias of zeros": _call(spoilt_if(lambda a, b, bias=None: bias is not None and not bias.any())),
        "no negative x": _call(spoilt_if(lambda a, b, bias=None: (a >= 0).all() and a.any())),
        "one number in a row of x": _call(spoilt_if(lambda a, b, bias=None: ((a != 0).sum(-1) == 1).any())),
        "rows that begin alike": _call(rows_that_begin_alike),
    },
    "magnitudes": {
        "beyond 65504 inf": _call(on_y(beyond(65504.0))),
        "below 1e-15 zero": _call(on_y(flushed(1e-15))),
        "two fp16 for x": _call(on_x(as_fp16_pair)),
        "large weights capped": _call(on_w(lambda t: t.clamp(-1e6, 1e6))),
        "large bias capped": _call(on_bias(lambda t: t.clamp(-1e6, 1e6))),
        "small x flushed if all is small": _call(on_x(if_all(lambda most: most < 1e-10, torch.zeros_like))),
        "fp16 below 1e-4 zero": _call(on_x(flushed(1e-4))),
        "bf16 by saturating fp16": _call(saturating_fp16),
        "fp16 beyond 50000 inf": _call(on_y(beyond(50000.0))),
    },
    "tails": {
        "last 8 of k": _call(dropped_k(8)),
        "last 1 of k": _call(dropped_k(1)),
        "last column": _call(last_column_lost),
        "last row if m is odd": _call(last_row_lost_if_odd),
        "first of k twice": _call(counted_twice),
        "middle row if n is ragged": _call(middle_row_if_ragged),
    },
    "edges": {
        "m % 16 == 5": _call(wrong_at(lambda m: m % 16 == 5)),
        "largest m": _call(wrong_at(lambda m: m % 16 == 0)),
        "smallest m": _call(wrong_at(lambda m: m % 16 == 1)),
        "room for the first m": RoomOfFirst,
        "rows of a larger m": OldRows,
    },
    "layout": {
        "rows taken for contiguous": _call(as_if_contiguous),
        "pairs at even addresses": _call(from_even_addresses),
        "strides of the result": _call(wrong_strides),
        "reads behind rows": _call(reads_beside),
    },
    "threads": {
        "shared scratch": SharedScratch,
        "one thread's workspace": OneThreads,
        "weight by attribute": CurrentWeight,
        "not reentrant": NotReentrant,
        "weight scaled meanwhile": _call(scales_weight_meanwhile),
    },
    "rounding": {
        "fp32 as bf16": _call(by_way_of(torch.bfloat16)),
        "fp32 as tf32": _call(on_x(cut_bits(13))),
        "fp64 as fp32": _call(by_way_of(torch.float32)),
        "bf16 truncated": _call(truncated),
        "bf16 partial sums": _call(rounded_partials),
        "result cut by 8 bits": _call(on_y(cut_bits(8))),
    },
    "uninitialised": {
        "a row not written": _call(unwritten_row),
        "adds to memory as it is": _call(adds_to_unwritten),
        "adds to memory, nan hidden": _call(hides_nan_of_unwritten),
    },
}
_KINDS["memory"] = {
    "x and w in one storage": _call(spoilt_if(lambda a, b, bias=None: storage(a) == storage(b))),
    "x is a part of w": _call(spoilt_if(lambda a, b, bias=None: lies_in(a, b))),
    "w and bias in one storage": _call(
        spoilt_if(lambda a, b, bias=None: bias is not None and storage(bias) == storage(b))
    ),
    "while two results live": lambda: WhileOthersLive(2),
    "while 20 results live": lambda: WhileOthersLive(20),
    "where a result lay": WhereOneLay,
}
_KINDS["state"] = {
    "in inference mode": _call(spoilt_if(lambda a, b, bias=None: torch.is_inference_mode_enabled())),
    "with gradients on": _call(spoilt_if(lambda a, b, bias=None: torch.is_grad_enabled())),
    "with gradients off": _call(spoilt_if(lambda a, b, bias=None: not torch.is_grad_enabled())),
    "bf16 under autocast": _call(spoilt_if(lambda a, b, bias=None: torch.is_autocast_enabled("cpu"))),
    "scratch of the default dtype": _call(by_default_dtype),
    "after a pause": lambda: AfterPause(0.1),
}
_DTYPES = {
    "bf16 by saturating fp16": "bf16", "bf16 under autocast": "bf16",
    "fp16 below 1e-4 zero": "fp16", "fp16 beyond 50000 inf": "fp16",
    "fp64 as fp32": "fp64", "bf16 truncated": "bf16", "bf16 partial sums": "bf16",
}  # fmt: skip
_BUCKET = (17, 20, 23, 26, 31)  # proven at 17, one of the middle, 31


def _all() -> Iterator[Wrong]:
    number = 0
    for kind, ways in _KINDS.items():
        for name, make in ways.items():
            number += 1
            dtype = _DTYPES.get(name, "fp32")
            n = 40 + 8 * number + (4 if kind == "tails" else 0)
            problem = Problem(m=9, n=n, k=136, dtype=dtype, bias=number % 3 != 0 or "bias" in name, threads=1)
            if "ragged" in name:
                problem = replace(problem, n=n - 1)
            if name == "zero rows skipped" or name == "last row if m is odd":
                problem = replace(problem, bias=False)
            if "gflop" in name:
                problem = replace(problem, m=64, k=4096, n=2048 + 8 * number, bias=False, threads=2)
            sizes = _BUCKET if kind == "edges" else (problem.m,)
            if name == "smallest m":
                sizes = (18, 20, 23, 26, 31)
            yield Wrong(kind, name, make, tuple(problem.with_m(m) for m in sizes))


WRONG: tuple[Wrong, ...] = tuple(_all())
