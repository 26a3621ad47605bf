"""torch._int_mm of an unmodified program, as torchao's dynamic quantisation calls it: captured, tuned, served."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hooked import Home, publish, published

from gemmtuned.configs.problem import Problem
from gemmtuned.db import queries

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PROBLEM = Problem(m=1, n=4096, k=512, dtype="i8", out_dtype="i32", threads=1)
PROGRAM = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((1, 512), (4096, 512)))
model = {model}
ready()
with torch.inference_mode():
    y = [model(x, w.t()) for _ in range(20)][-1]
print(torch.equal(y, (x.long()[:, None] * w.long()).sum(-1).int()))  # no GEMM: only those above are counted
"""
WAIT = "\n".join(("def ready():", "    import gemmtuned", "    assert gemmtuned.ready(20)", ""))
NO_WAIT = "def ready(): pass\n"
EAGER, COMPILED = "torch._int_mm", "torch.compile(lambda a, b: torch._int_mm(a, b), fullgraph=True)"


def command(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = home.environment(AITER_TUNE_GEMM="0", **ONE_THREAD)
    words = [sys.executable, "-P", "-m", "gemmtuned", *arguments]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=110, check=False)


def run(home: Home, model: str, *, wait: bool) -> None:
    done = home.run((WAIT if wait else NO_WAIT) + PROGRAM.format(model=model), fresh=True, **ONE_THREAD)
    assert (done.code, done.out.strip()) == (0, "True"), done.err


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_is_captured_tuned_and_served_eager_and_compiled(home: Home) -> None:
    run(home, EAGER, wait=False)
    assert home.counts() == {(str(PROBLEM), "miss"): 20}

    for _ in range(6):
        tuned = command(home, "tune")
        if tuned.returncode != 75:  # else others use the CPU: no times can be taken
            break
    else:
        pytest.skip(f"the machine is in use: {tuned.stdout}")
    assert tuned.returncode == 0, tuned.stderr + tuned.stdout
    (row,) = queries.solutions(home.path / "tune.db")
    assert (row["problem"], row["err"], row["baseline_err"]) == (str(PROBLEM), 0.0, 0.0)
    trials = json.loads(command(home, "trials", "--json").stdout)
    raced = {trial["backend"]: trial["outcome"] for trial in trials["rows"]}
    assert raced["torch_swap"] == "ok", raced

    if row["backend"] == "torch":  # it depends on the CPU which of the two is the faster one
        publish(home.path / "configs", [published(PROBLEM, "torch_swap")], generation=100)
    for model in (EAGER, COMPILED):
        run(home, model, wait=True)
    assert home.counts() == {(str(PROBLEM), "miss"): 20, (str(PROBLEM), "exact"): 40}
