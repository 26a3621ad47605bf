"""Batch-invariant products by the native hook's CUDA half, on a driver that is a fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_cuda_build import PRELUDE
from fake_families import OPERANDS
from hooked import Home


@pytest.fixture
def run(home: Home, fakes: Path) -> Any:
    def program(code: str) -> Any:
        return home.run(
            PRELUDE + OPERANDS + code, str(fakes), ".", GEMMTUNED="0", AITER_TUNE_GEMM="0"
        ).said  # fmt: skip

    return program


def test_rows_are_taken_so_many_at_a_time_into_whatever_result_the_program_has(run: Any) -> None:
    """Torch's own product of a call that is left to it has other bits, so this copies where the kernel cannot write."""
    said = run(
        """
    one = replace(problem, batch_invariant=True)
    hook.install()
    hook.load([native.Row(one, "exact", "eager", 7, 5, "cuda:0", launch, packed.conditions(record.checked, 2),
                          chain_rows=3)], 1)
    hook.set_switches(native.CAPTURE | native.DISPATCH | native.INVARIANT)
    x = torch.randn(7, 16)
    right, [gx] = x @ w.t(), to_gpu(x)
    results = {
        "of torch": None, "dense": torch.zeros(7, 8), "padded": torch.zeros(7, 12)[:, :8],
        "columns": torch.zeros(8, 7).t(), "not aligned": torch.zeros(57)[1:].view(7, 8),
    }
    said = {}
    for name, out in results.items():
        given = {} if out is None else {"out": torch.ops.fake.on_gpu(out)}
        y = torch.mm(gx, gw.t(), **given)
        said[name] = [torch.allclose(host(y), right, atol=1e-4), outcomes(), calls("cuLaunchKernel")]
    print(json.dumps([said, hook.failures()]))
    """
    )
    names = ("of torch", "dense", "padded", "columns", "not aligned")
    assert said == [{name: [True, ["dense exact 1"], 3 * i] for i, name in enumerate(names, 1)}, []]
