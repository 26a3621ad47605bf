"""Ways in which a program reaches a GEMM, each with the calls that the hook must count for it.

A program makes its own inputs, so that it gives the same result every time, and returns tensors (in any nesting).  An
exception is a result too.  `counts`: problem without its threads -> calls; None where torch decides how many.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import linear as early_linear  # imported before any patch

M, N, K = 4, 8, 16
LINEAR = "fp32:4x8x16"


@dataclass(frozen=True)
class Program:
    run: Callable[[], Any]
    counts: dict[str, int] | None
    exact: bool = True  # the same inputs give the same bits


PROGRAMS: dict[str, Program] = {}


def program(counts: dict[str, int] | None, *, exact: bool = True) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def keep(run: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[run.__name__] = Program(run, counts, exact)
        return run

    return keep


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    if dtype.is_floating_point:
        return made.to(dtype)
    if dtype.is_complex:
        return torch.complex(made, made.flip(0)).to(dtype)
    return (made * 3).to(dtype)


def layer(n: int = N, k: int = K, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(rand(n, k, seed=1))
        if bias:
            made.bias.copy_(rand(n, seed=2))
    return made


# ---- plain calls


@program({LINEAR: 1})
def matmul_operator():
    return rand(M, K) @ rand(N, K).T


@program({LINEAR: 1})
def linear_without_bias():
    return F.linear(rand(M, K), rand(N, K))


@program({"fp32:4x8x16+bias": 1})
def linear_3d_with_bias():
    return F.linear(rand(2, 2, K), rand(N, K), rand(N))


@program({"fp32:4x8x16+bias": 2})
def linear_module_and_early_import():
    made = layer()
    with torch.no_grad():
        return made(rand(M, K)), early_linear(rand(M, K), made.weight, made.bias)


@program({LINEAR: 2, "fp32:4x8x16+bias": 1})
def inference_mode_and_no_grad():
    with torch.inference_mode():
        a = F.linear(rand(M, K), rand(N, K))
        inside = layer()(rand(M, K))
    with torch.no_grad():
        return a.clone(), inside.clone(), torch.mm(rand(M, K), rand(N, K).t())


@program({"fp32:1x8x16": 1, "fp32:1x8x16+bias": 1, "fp32:4x1x16": 1, "fp32:1x1x16": 1, "fp32:1x8x1,layout=nn": 1})
def sizes_of_one():
    x, w = rand(1, K), rand(N, K)
    return (
        F.linear(x, w),
        F.linear(x, w, rand(N)),
        F.linear(rand(M, K), rand(1, K)),
        F.linear(x, rand(1, K)),
        F.linear(rand(1, 1), rand(N, 1)),
    )


@program({"fp32:4x8x16+bias": 1, "dense_add:fp32:4x8x16": 4})
def addmm_in_all_its_forms():
    c, x, wt = rand(M, N), rand(M, K), rand(N, K).t()
    return (
        torch.addmm(rand(N), x, wt),
        torch.addmm(c, x, wt),
        torch.addmm(rand(N), x, wt, beta=0.5),
        torch.addmm(rand(1), x, wt, alpha=2),
        c.clone().addmm_(x, wt, beta=0.25, alpha=-1),
    )


@program({"fp32:4x8x16+bias": 3, "dense_add:fp32:4x8x16": 2})
def addmm_with_a_function_behind_it():
    x, wt, act = rand(M, K), rand(N, K).t(), torch._addmm_activation
    out = act(rand(M, N), x, wt, beta=2, out=torch.empty(M, N), use_gelu=True)
    sums = [act(rand(N), x, wt, use_gelu=gelu) for gelu in (False, True)]
    return sums, out, act(rand(N), x, wt, alpha=0.5), act(rand(N), x, wt, out=torch.empty(0))


@program({"batched:fp32:3x4x8x16,layout=nn": 1, "batched:fp32:3x4x8x16": 2})
def bmm():
    a, b = rand(3, M, K), rand(3, K, N)
    return torch.bmm(a, b), torch.bmm(a, rand(3, N, K).mT), a @ rand(3, N, K).mT


@program({"batched_add:fp32:3x4x8x16,layout=nn": 3})
def baddbmm_in_all_its_forms():
    c, a, b = rand(3, M, N), rand(3, M, K), rand(3, K, N)
    out = torch.empty(3, M, N)
    return torch.baddbmm(c, a, b, beta=0.5, alpha=2), c.clone().baddbmm_(a, b), torch.baddbmm(c, a, b, out=out)


@program({LINEAR: 1, "batched:fp32:3x4x8x16": 1})
def einsum_of_one_matrix_is_dense():
    return torch.einsum("mk,nk->mn", rand(M, K), rand(N, K)), torch.einsum("bmk,bnk->bmn", rand(3, M, K), rand(3, N, K))


@program({"fp32:12x8x16,layout=nn": 1, "batched:fp32:6x4x8x16,layout=nn": 1, "fp32:1x8x16,layout=nn": 1})
def matmul_with_other_ranks():
    heads = torch.matmul(rand(2, 3, M, K), rand(2, 3, K, N))
    return torch.matmul(rand(3, M, K), rand(K, N)), heads, torch.matmul(rand(K), rand(K, N)), rand(M, K) @ rand(K)


# ---- out=


@program({LINEAR: 1, "fp32:4x8x16+bias": 1, "dense_add:fp32:4x8x16": 1, "batched:fp32:3x4x8x16,layout=nn": 1})
def out_of_the_right_size():
    o = [torch.empty(M, N) for _ in range(3)]
    x, wt = rand(M, K), rand(N, K).t()
    torch.mm(x, wt, out=o[0])
    torch.addmm(rand(N), x, wt, out=o[1])
    torch.addmm(rand(M, N), x, wt, out=o[2], beta=2)
    return o, torch.bmm(rand(3, M, K), rand(3, K, N), out=torch.empty(3, M, N))


@program({LINEAR: 2, "batched:fp32:3x4x8x16,layout=nn": 1})
def out_of_another_size_is_resized():
    x, wt = rand(M, K), rand(N, K).t()
    three = torch.bmm(rand(3, M, K), rand(3, K, N), out=torch.empty(0))
    return torch.mm(x, wt, out=torch.empty(0)), torch.mm(x, wt, out=torch.empty(9, 9)), three


@program({LINEAR: 2})
def out_with_strides_of_its_own():
    columns, rows = torch.zeros(M, 2 * N), torch.zeros(N, M)
    x, wt = rand(M, K), rand(N, K).t()
    return torch.mm(x, wt, out=columns[:, :N]), columns, torch.mm(x, wt, out=rows.t()), rows


@program({})
def out_of_another_dtype_is_refused():
    torch.mm(rand(M, K), rand(N, K).t(), out=torch.empty(M, N, dtype=torch.float64))


@program({})
def out_whose_elements_share_memory_is_refused():
    torch.mm(rand(M, K), rand(N, K).t(), out=torch.empty(1, N).expand(M, N))


# ---- autograd, autocast, transforms

BACKWARD = {"fp32:4x8x16+bias": 1, "fp32:4x16x8,layout=nn": 1, "fp32:8x16x4,layout=tn": 1}


@program(BACKWARD)
def autograd_backward():
    made, x = layer(), rand(M, K).requires_grad_()
    (made(x) * rand(M, N)).sum().backward()
    return x.grad, made.weight.grad, made.bias.grad


@program({LINEAR: 1, "fp32:4x16x8,layout=nn": 1, "fp32:8x16x4,layout=tn": 1})
def double_backward():
    x, w = rand(M, K).requires_grad_(), rand(N, K).requires_grad_()
    (gx,) = torch.autograd.grad((F.linear(x, w) * rand(M, N)).sum(), x, create_graph=True)
    return gx, torch.autograd.grad((gx * rand(M, K, seed=3)).sum(), w)


@program({"bf16:4x8x16+bias": 1, "bf16:4x8x16": 1})
def autocast_to_bf16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer()(rand(M, K)), rand(M, K) @ rand(N, K).T


@program({"bf16:4x8x16+bias": 1, "bf16:4x16x8,layout=nn": 1, "bf16:8x16x4,layout=tn": 1})
def autocast_backward():
    made, x = layer(), rand(M, K).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = made(x)
    (y * rand(M, N)).sum().backward()
    return y, x.grad, made.weight.grad


@program(None)
def vmap():
    w = rand(N, K)
    many = torch.vmap(lambda x: F.linear(x, w))(rand(M, K))
    weights = torch.vmap(lambda v: F.linear(rand(M, K), v))(rand(3, N, K))
    both = torch.vmap(torch.mm)(rand(3, M, K), rand(3, K, N))
    return many, weights, both


@program(None)
def func_grad_jvp_and_hessian():
    w = rand(N, K)

    def loss(x):
        return F.linear(x, w).square().sum()

    x = rand(M, K)
    jvp = torch.func.jvp(loss, (x,), (rand(M, K, seed=5),))
    per_row = torch.vmap(torch.func.grad(lambda row: F.linear(row, w).square().sum()))(x)
    return torch.func.grad(loss)(x), jvp, per_row, torch.func.hessian(loss)(rand(1, K))


@program(None)
def layers_made_of_gemms():
    torch.manual_seed(0)
    attention, lstm = nn.MultiheadAttention(K, 2, batch_first=True), nn.LSTM(K, N, batch_first=True)
    x = rand(2, M, K)
    y = attention(x, x, x)[0]
    (y.sum() + lstm(x)[0].sum()).backward()
    with torch.inference_mode():
        fast = nn.TransformerEncoderLayer(K, 2, 32, batch_first=True).eval()(x)
    return y, [p.grad for p in lstm.parameters()], fast.clone()


@program(None)
def copies_and_traces():
    made = layer().eval()
    x = rand(M, K)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        return [
            copy.deepcopy(made)(x),
            pickle.loads(pickle.dumps(made))(x),
            loaded(x),
            torch.jit.trace(made, x)(x),
            torch.jit.script(made)(x),
            torch.fx.symbolic_trace(made)(x),
            torch.export.export(made, (x,)).module()(x),
        ]


# ---- what is no GEMM, or not one we know


@program({})
def wrong_shapes_mm():
    torch.mm(rand(M, K), rand(N, K))


@program({})
def wrong_shapes_linear():
    F.linear(rand(2, 3, 10), rand(N, K), rand(N))


@program({})
def wrong_shapes_bmm():
    torch.bmm(rand(3, M, K), rand(2, K, N))


@program({})
def wrong_shapes_addmm():
    torch.addmm(rand(5), rand(M, K), rand(K, N))


@program({})
def wrong_shapes_addmm_with_a_function():
    torch._addmm_activation(rand(5), rand(M, K), rand(K, N))


@program({})
def wrong_ranks():
    torch.mm(rand(M, K), rand(1, K, N))


@program({})
def mixed_dtypes():
    torch.mm(rand(M, K), rand(K, N, dtype=torch.float64))


@program({})
def empty_tensors():
    return (
        torch.mm(rand(0, K), rand(K, N)),
        torch.mm(rand(M, 0), rand(0, N)),
        torch.mm(rand(M, K), rand(K, 0)),
        torch.bmm(rand(0, M, K), rand(0, K, N)),
        torch.addmm(rand(N), rand(M, 0), rand(0, N)),
        F.linear(rand(0, K), rand(N, K), rand(N)),
    )


DTYPES = {"i64": torch.int64, "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8, "fp64": torch.float64}


@program({f"{name}:4x8x16": 1 for name in [*DTYPES, "c64", "fp16", "bf16"]})
def other_dtypes():
    dtypes = [*DTYPES.values(), torch.complex64, torch.float16, torch.bfloat16]
    return [torch.mm(rand(M, K, dtype=d), rand(N, K, dtype=d).t()) for d in dtypes]


@program(None)
def lazy_conjugates_and_negatives():
    a, b = rand(M, K, dtype=torch.complex64), rand(K, N, dtype=torch.complex64)
    return torch.mm(a.conj(), b), torch.mm(a, b.conj()), torch.mm(torch.view_as_real(a.conj())[..., 1], b.real)


# ---- memory


@program(
    {
        "fp32:4x8x16,layout=tt": 1,
        "fp32:4x8x16,layout=nn": 2,
        "fp32:4x8x16,layout=st": 1,
        "fp32:4x8x16,layout=ns": 1,
        "fp32:4x8x16": 4,
    }
)
def strides():
    x, w = rand(M, K), rand(N, K)
    return (
        torch.mm(rand(K, M).t(), w.t()),
        torch.mm(x, rand(K, N)),
        torch.mm(x, rand(K, 2 * N)[:, :N]),
        torch.mm(rand(M, 2 * K)[:, ::2], w.t()),
        torch.mm(x, rand(2 * K, 2 * N)[::2, ::2]),
        torch.mm(rand(M, 2 * K)[:, :K], w.t()),
        torch.mm(rand(1, K).expand(M, K), w.t()),
        torch.mm(x, rand(N, 2 * K)[:, K:].t()),
        torch.mm(rand(2 * M, K)[M:], rand(2 * N, K)[N:].t()),
    )


@program({"fp32:4x8x16+bias": 2})
def strided_bias():
    x, w = rand(M, K), rand(N, K)
    return F.linear(x, w, rand(2 * N)[::2]), F.linear(x, w, rand(1).expand(N))


@program({LINEAR: 1, "fp32:4x8x16,deterministic=1": 1})
def deterministic_algorithms():
    x, w = rand(M, K), rand(N, K)
    torch.set_deterministic_debug_mode("error")  # the same switch, by a function that imports no compiler for it
    try:
        y = F.linear(x, w)
    finally:
        torch.set_deterministic_debug_mode("default")
    return y, F.linear(x, w)


@program({LINEAR: 1, "fp32:4x8x16,math=bf16": 1, "fp32:4x8x16,math=tf32": 1})
def float32_matmul_precision():
    x, w = rand(M, K), rand(N, K)
    found = []
    try:
        for precision in ("medium", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append(F.linear(x, w))
    finally:
        torch.set_float32_matmul_precision("highest")
    return found


@program({"fp32:4x8x16": 1}, exact=False)
def out_that_is_an_operand():
    x = rand(M, K)
    return torch.mm(x, rand(N, K).t(), out=x.view(8, 8)[:M]) * 0  # torch promises nothing; it must not crash
