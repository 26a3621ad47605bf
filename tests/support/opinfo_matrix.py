"""PyTorch's own operator samples (OpInfo) on stock torch, then captured, then with routes for every shape seen.

    python tests/support/opinfo_matrix.py SAID.json [--device cuda]

One process for all: importing torch's operator database takes seconds.  Written: {"counts": {...}, "found": [...]},
where `found` names whatever a program could tell from stock torch.  On CUDA the routes are the first candidates of
cuBLASLt and of our Triton kernels, compiled here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from hooked import publish, published
from programs_counted import counted, profiled
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks import activate
from gemmtuned.hooks.dispatch import SERVED
from gemmtuned.kernels.backends import BACKENDS

OPERATORS = (
    "nn.functional.linear", "mm", "addmm", "bmm", "matmul", "__rmatmul__", "baddbmm", "addbmm", "einsum", "inner",
    "tensordot", "linalg.multi_dot", "torch._scaled_mm",
)  # fmt: skip
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex128, torch.int64,
    torch.float8_e4m3fn,
)  # fmt: skip
CUDA_BACKENDS = ("cublaslt", "triton")
CPU_BACKENDS = ("torch_swap", "torch_mv", "onednn")
PROFILED = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)  # reading a profile takes longer than the calls
FAST = {"fast_mode": True, "check_undefined_grad": False}


@dataclass(frozen=True)
class Case:
    """One operator with one dtype, and its samples."""

    op: OpInfo
    dtype: torch.dtype
    samples: tuple[SampleInput, ...]

    def __str__(self) -> str:
        return f"{self.op.name} {self.dtype}"


def cases(device: str, every: int) -> list[Case]:
    """All operators in all their dtypes, with one of so many samples each."""
    made = []
    for op in op_db:
        if op.name not in OPERATORS or op.variant_test_name:
            continue
        supported = op.supported_dtypes(device)
        for dtype in DTYPES:
            if dtype in supported:
                torch.manual_seed(0)
                grad = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
                samples = tuple(op.sample_inputs(device, dtype, requires_grad=grad))[::every]
                made.append(Case(op, dtype, samples))
    return made


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as err:
        return f"{type(err).__name__}: {err}".splitlines()[0]


def forward_and_backward(op: OpInfo, sample: SampleInput) -> Any:
    """The result, and the gradient of every input that asks for one."""
    y = op(sample.input, *sample.args, **sample.kwargs)
    asked = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    (out,) = tensors(y)
    if not asked or not out.requires_grad:
        return [out.detach()]
    weight = torch.linspace(0.5, 1.5, max(out.numel(), 1), device=out.device).to(out.dtype)[: out.numel()]
    grads = torch.autograd.grad(out, asked, weight.reshape(out.shape), allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


@torch.inference_mode()
def inference(op: OpInfo, sample: SampleInput) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs).clone()


@torch.no_grad()
def into(op: OpInfo, sample: SampleInput, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """out=, made from what the operator returns by itself."""
    out = make(op(sample.input, *sample.args, **sample.kwargs))
    op(sample.input, *sample.args, **sample.kwargs, out=out)
    return out


OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": torch.zeros_like,
    "empty": lambda y: y.new_empty(0),
    "strided": lambda y: torch.zeros(*y.shape, 2, dtype=y.dtype, device=y.device)[..., 0],
}


def uses(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What test_ops.py does with an operator's samples: plain, views, inference mode, out= of several kinds."""
    for i, sample in enumerate(case.samples):
        yield f"sample {i}", partial(forward_and_backward, case.op, sample)
        yield f"sample {i} non-contiguous", partial(forward_and_backward, case.op, sample.noncontiguous())
        yield f"sample {i} inference", partial(inference, case.op, sample)
        for kind, make in OUTS.items() if case.op.supports_out else ():
            yield f"sample {i} out {kind}", partial(into, case.op, sample, make)


def refused(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Uses that torch refuses."""
    for i, sample in enumerate(case.samples if case.op.supports_out else ()):
        yield f"sample {i} out of another dtype", partial(into, case.op, sample, lambda y: y.new_zeros(y.shape).short())


def results(case: Case) -> dict[str, Any]:
    return {name: outcome(run) for name, run in (*uses(case), *refused(case))}


def difference(stock: Any, found: Any, *, exact: bool) -> str:
    """What tells the two apart; empty when they are equal, or (not exact) equal up to rounding."""
    if isinstance(stock, str) or isinstance(found, str):
        return "" if stock == found else f"{found!r}, not {stock!r}"
    ours, theirs = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(stock)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return f"{a!r}, not {b!r}"
            continue
        facts = [(t.dtype, tuple(t.shape), t.stride()) for t in (a, b)]
        if facts[0] != facts[1]:
            return f"{facts[0]}, not {facts[1]}"
        off = distance(a, b)
        if off > (0 if exact else 8):  # roundings of the largest element: both sum up to 25 products in some order
            return f"off by {off:.3g} roundings of its largest element"
    return ""


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, in roundings of the largest element; inf where only one of them is finite."""
    if torch.equal(torch.nan_to_num(wide(a)), torch.nan_to_num(wide(b))):
        return 0.0
    eps = torch.finfo(a.dtype).eps if a.dtype.is_floating_point or a.dtype.is_complex else 1.0
    one, other = wide(a), wide(b)
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return ((one - other).abs().nan_to_num().max() / (other.abs().nan_to_num().max() * eps)).item()


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to(torch.complex128 if t.dtype.is_complex else torch.float64)


def derivatives(found: list[Case]) -> Iterator[tuple[str, Any]]:
    """Analytic derivatives beside numeric ones: first, forward mode, and (real only) second; True where they agree."""
    for case in found:
        if case.dtype not in (torch.float64, torch.complex128) or not case.op.supports_autograd:
            continue
        for i, sample in enumerate(case.samples):
            args = (sample.input, *sample.args)
            if not all(isinstance(t, torch.Tensor) for t in args):
                continue  # lists of operands (einsum, multi_dot): compared with stock torch as they are
            run = partial(case.op, **sample.kwargs)
            yield f"{case} sample {i}", outcome(partial(gradcheck, run, args, check_forward_ad=True, **FAST))
            if case.dtype == torch.float64:
                yield f"{case} sample {i}, second", outcome(partial(gradgradcheck, run, args, **FAST))


def error_samples(found: list[Case], device: str) -> dict[str, Any]:
    """What torch says to each wrong use it knows of."""
    said = {}
    for op in {id(case.op): case.op for case in found}.values():
        if op.error_inputs_func is None:
            continue
        for i, wrong in enumerate(op.error_inputs(device)):
            sample = wrong.sample_input
            said[f"{op.name} error {i}"] = outcome(lambda o=op, s=sample: o(s.input, *s.args, **s.kwargs))
    return said


def cuda_solutions(name: str, problems: Iterable[Problem], folder: Path) -> Iterator[Solution]:
    """The first candidate of a backend for each problem that it takes, its binary in place."""
    from gemmtuned.configs.manifest import BINARIES, make_folder
    from gemmtuned.kernels.backends import environment
    from gemmtuned.kernels.device import cuda_device

    device, backend = cuda_device(0), BACKENDS[name]
    make_folder(folder / BINARIES)
    for problem in problems:
        for candidate in list(backend.candidates(problem))[:1] if problem.family in SERVED else ():
            launch, binary = backend.launch_of(candidate, problem)  # type: ignore[attr-defined]
            if binary is not None:
                file = folder / BINARIES / sha256(binary).hexdigest()
                file.write_bytes(binary)
                file.chmod(0o644)
            made = published(problem, name, device=device.key, stamp=environment(device).stamps[name])
            yield replace(made, config=candidate.config, launch=launch)


def tables(problems: list[Problem], device: str, folder: Path) -> dict[str, list[Solution]]:
    """Backend -> a table with all the problems that it offers a route for."""
    if device == "cuda":
        return {name: list(cuda_solutions(name, problems, folder)) for name in CUDA_BACKENDS}
    return {
        name: [published(p, name) for p in problems if p.family in SERVED and tuple(BACKENDS[name].candidates(p))]
        for name in CPU_BACKENDS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("said", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--every", type=int, default=1, help="one of so many samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = cases(args.device, args.every)
    for case in found:  # what a first call builds (oneDNN primitives) may choose another path than the second
        results(case)
    stock = {str(case): results(case) for case in found}
    errors = error_samples(found, args.device)

    gemmtuned.enable()
    hook = activate.current()
    assert hook is not None and hook.path == "native", hook and hook.note
    hook.stop()  # this process drains by itself
    said: dict[str, Any] = {"cases": len(found), "found": [], "miscounted": [], "hits": {}, "calls": 0}
    seen: Counter[Problem] = Counter()
    for case in found:
        if case.dtype in PROFILED:
            with profiled(args.device) as profile:
                for name, run in uses(case):
                    if not isinstance(stock[str(case)][name], str):  # what torch refuses is in its profile, too
                        run()
            ours = counted(hook)
            if ours.total() != profile.gemms:
                said["miscounted"].append(f"{case}: {ours.total()} counted, the profiler saw {profile.gemms}")
        said["found"] += compare(f"captured {case}", stock[str(case)], results(case), exact=True)
        seen.update(counted(hook))
    said["calls"] = seen.total()
    said["found"] += compare("captured", errors, error_samples(found, args.device), exact=True)

    folder = hook.settings.config_dir
    for generation, (backend, rows) in enumerate(tables(list(seen), args.device, folder).items(), 1):
        publish(folder, rows, generation)
        assert gemmtuned.reload() == generation
        list(hook.drain())
        for case in found:
            said["found"] += compare(f"{backend} {case}", stock[str(case)], results(case), exact=False)
        said["found"] += compare(backend, errors, error_samples(found, args.device), exact=True)
        said["hits"][backend] = sum(s.calls for s in hook.drain() if s.outcome == "exact")
        if backend in (
            CPU_BACKENDS[0],
            CUDA_BACKENDS[0],
        ):  # it takes fp64 and complex, which the numeric derivatives need
            checked = dict(derivatives(found))
            said["derivatives"] = len(checked)
            said["found"] += [f"derivatives {name}: {told}" for name, told in checked.items() if told is not True]
    said["failures"] = [reason for _, reason in hook.native.failures()] if hook.native else []
    args.said.write_text(json.dumps(said, indent=1))


def compare(where: str, stock: dict[str, Any], found: dict[str, Any], *, exact: bool) -> list[str]:
    assert stock.keys() == found.keys()
    told = ((name, difference(stock[name], found[name], exact=exact)) for name in stock)
    return [f"{where} {name}: {text}" for name, text in told if text]


if __name__ == "__main__":
    sys.exit(main())
