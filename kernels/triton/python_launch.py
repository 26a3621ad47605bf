"""Run a kernel of this package on torch tensors: the compiled binary on a device, Triton's interpreter without one.

For measuring, checking and tests.  Programs that serve do not come through here: their calls are launched by
the native hook from the same record and binary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch_values import Operands, arguments_of, grid_of, holds
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.own_kernel import Config
from gemmtuned.kernels.triton.kernel import is_interpreted
from gemmtuned.kernels.triton.launch import LaunchRecord

DTYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_compiled: dict[Any, Any] = {}


def problem_of(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Problem:
    """The problem these tensors pose. Raises CandidateFailed when it is none of ours."""
    if x.dtype not in DTYPES or w.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise CandidateFailed(f"tensors are {x.dtype} and {w.dtype}, expected all bfloat16 or all float16")
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or (bias is not None and bias.shape != w.shape[:1]):
        raise CandidateFailed(f"x is {list(x.shape)}, w is {list(w.shape)}: expected [M, K], [N, K] and a bias of [N]")
    return Problem(m=x.shape[0], n=w.shape[0], k=x.shape[1], bias=bias is not None, dtype=DTYPES[x.dtype])


def new_workspace(record: LaunchRecord, device: torch.device | str) -> torch.Tensor | None:
    """Workspace for one stream, its counters zero and its partial sums NaN, or None when none is needed."""
    if not record.workspace_bytes:
        return None
    with torch.inference_mode(False):  # it serves calls outside of that mode, too
        space = torch.full((record.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)  # all ones is a NaN
        space[: record.partials_offset].zero_()
    return space


def launcher(
    kernel: Any, record: LaunchRecord, arch: str | None = None
) -> Callable[[Operands, torch.Tensor | None], None]:
    """A function (operands by slot, workspace) that launches on the current stream; it checks nothing.

    arch None: the current device's.  Raises CandidateFailed when it does not compile or load.
    """
    names = kernel.arg_names
    interpreted = is_interpreted(kernel)
    if interpreted:
        options = {name: record.constants[name] for name in names if name in record.constants}
    else:
        from gemmtuned.kernels.compile import compile_kernel

        compiled = compile_kernel(record, arch or device_arch())
        try:
            compiled._init_handles()
        except Exception as err:  # out of resources, or the driver refuses the binary
            raise CandidateFailed(f"{record.kernel} {record.constants}: does not load: {err}") from err
    offset, counters, as_launched = record.partials_offset, record.counters_bytes, record.launch
    constants = [record.constants.get(name) for name in names]

    def launch(operands: Operands, space: torch.Tensor | None) -> None:
        scratch: dict[str, Any] = {}
        if space is not None:
            scratch["counters"] = space[:counters].view(torch.int32)
            scratch["partials"] = space[offset:].view(torch.float32)
        found = arguments_of(as_launched, operands, pointer=lambda operand: operand, **scratch)
        values = dict(zip(record.arguments, found, strict=True))
        grid = grid_of(as_launched.grid, operands)
        if interpreted:
            arguments = {name: values.get(name) for name in names if name not in options}
            kernel[grid](**arguments, **options, num_warps=record.num_warps, num_stages=record.num_stages)
        else:
            compiled[grid](*[values.get(name, constant) for name, constant in zip(names, constants, strict=True)])

    return launch


def run(
    module: Any,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y [M, N] = x [M, K] @ w [N, K].T + bias on x's device, compiled once per problem and config.

    module: a kernel's file of this folder.  workspace: one of `new_workspace`, or None for a fresh one.  Raises
    CandidateFailed for what the kernel cannot run.
    """
    problem = problem_of(x, w, bias)
    record: LaunchRecord = module.launch_record(config, problem)
    operands = {"x": x, "w": w, "bias": bias}
    if not holds(record.launch.checked, operands):
        raise CandidateFailed(f"{problem}: {record.kernel} does not take operands of these strides or alignment")
    key = (record.kernel, problem, tuple(sorted(config.items())), x.device)
    if key not in _compiled:
        _compiled[key] = launcher(module.KERNEL.function, record)
    if workspace is None:
        workspace = new_workspace(record, x.device)
    elif workspace.numel() < record.workspace_bytes:
        raise CandidateFailed(f"workspace has {workspace.numel()} bytes, {problem} needs {record.workspace_bytes}")
    y = torch.empty(problem.m, problem.n, dtype=x.dtype, device=x.device)
    _compiled[key]({**operands, "y": y}, workspace)
    return y


def device_arch() -> str:
    """`sm_90`, `gfx942` ... of the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
