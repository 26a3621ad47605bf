"""beta*C + alpha*X@W.T in every form of C, and batches of one: the routes of their problems serve them."""

from __future__ import annotations

import pytest
from hooked import Home, publish, published

from gemmtuned.configs.problem import Problem

PROGRAM = """
    import json, itertools, torch, gemmtuned
    assert gemmtuned.ready(20)
    torch.manual_seed(0)
    rand = torch.randn
    M, N, K, B = 4, 8, 16, 3
    def check(got, want):
        assert got.shape == want.shape and got.is_contiguous(), (got.shape, want.shape)
        assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()

    for batch, scales in itertools.product((1, B), ({}, {"beta": 0.5, "alpha": 2})):
        a, w = rand(batch, M, K), rand(batch, N, K).mT
        product = (a[..., None] * w[:, None]).sum(-2) * scales.get("alpha", 1)   # no GEMM
        for c in (rand(batch, M, N), rand(1, M, N), rand(batch, 1, N), rand(batch, M, 1), rand(M, N), rand(1, N),
                  rand(N), rand(1), rand(())):
            want = product + c * scales.get("beta", 1)
            check(torch.baddbmm(c, a, w, **scales), want)
            out = torch.empty(batch, M, N)
            check(torch.baddbmm(c, a, w, **scales, out=out), want)
        full = rand(batch, M, N)
        want = product + full * scales.get("beta", 1)
        check(full.baddbmm_(a, w, **scales), want)
    served = dict(baddbmm=4 * 19)

    for scales in ({}, {"beta": 0.5, "alpha": 2}):
        a, w = rand(M, K), rand(N, K).t()
        product = (a[..., None] * w[None]).sum(-2) * scales.get("alpha", 1)
        for c in (rand(M, N), rand(1, N), rand(M, 1), rand(1), rand(())):
            check(torch.addmm(c, a, w, **scales), product + c * scales.get("beta", 1))

    # nothing to multiply: torch's own answer, and no problem of ours
    for shape in ((0, M, K), (B, 0, K), (B, M, 0)):
        a, w = rand(shape), rand(shape[0], shape[2], N)
        c = rand(shape[0], shape[1], N)
        check(torch.baddbmm(c, a, w), c if shape[2] == 0 else torch.empty(shape[0], shape[1], N))
    errors = 0
    for c, a, w in ((rand(B, M, N + 1), rand(B, M, K), rand(B, K, N)), (rand(2, M, N), rand(B, M, K), rand(B, K, N)),
                    (rand(1, B, M, N), rand(B, M, K), rand(B, K, N)), (rand(M, N), rand(1, M, K), rand(2, K, N)),
                    (rand(B, M, N).double(), rand(B, M, K), rand(B, K, N))):
        try:
            torch.baddbmm(c, a, w)
        except RuntimeError:
            errors += 1
    print(json.dumps(errors))
"""


def test_every_form_of_c_and_batches_of_one_are_served(home: Home) -> None:
    dense, batched = (
        Problem(family=family, batch=batch, m=4, n=8, k=16, dtype="fp32", threads=2)
        for family, batch in (("dense_add", 1), ("batched_add", 3))
    )
    publish(home.path / "configs", [published(p, "torch_swap") for p in (dense, batched)], generation=1)

    done = home.run(PROGRAM)

    assert done.said == 5, "torch's own errors"
    hits = {problem: calls for (problem, outcome), calls in home.counts().items() if outcome == "exact"}
    assert hits == {str(dense): 2 * 19 + 10, str(batched): 2 * 19}
    assert {problem for problem, _ in home.counts()} == {str(dense), str(batched)}


@pytest.mark.parametrize("backend", ["onednn", "torch_mv"])
def test_a_row_of_a_backend_that_adds_no_c_serves_no_such_call(home: Home, backend: str) -> None:
    """No search finds one; a table that somebody has written may have it, and its results would lack C."""
    rows = [Problem(family="dense_add", m=m, n=8, k=16, dtype="fp32", threads=2) for m in (1, 4)]
    publish(home.path / "configs", [published(p, backend) for p in rows], generation=1)

    assert home.run(PROGRAM).said == 5, "torch's own errors"
    assert not [outcome for _, outcome in home.counts() if outcome == "exact"]
