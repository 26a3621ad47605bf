"""Models whose weights are wrapped: LoRA, quantised subclasses, sharded parameters and DTensors.

    python tests/support/wrapped_programs.py NAME...       (ranks: RANK, WORLD_SIZE and RENDEZVOUS, a file)

Each is built three times from the same seed and run on stock torch, captured, and with routes for all that was seen.
Printed: {name: {"calls", "profiled", "captured": "", "routed": "", "hits"}}, where text names a difference.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hook_matrix import difference
from hooked import published
from programs_counted import counted, profiled
from torch import Tensor, nn

import gemmtuned
from gemmtuned.hooks import activate
from gemmtuned.hooks.dispatch import SERVED
from gemmtuned.kernels.backends import BACKENDS

K, N, ROWS = 64, 48, 6
aten = torch.ops.aten


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, N, bias=bias), nn.GELU(), nn.Linear(N, K, bias=bias))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A training step: result, and every gradient that is there."""
    y = model(x)
    (y.float() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
    return [local(y.detach()), *(local(p.grad) for p in model.parameters() if p.grad is not None)]


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


# ---- LoRA


class LoRALinear(nn.Module):
    """As peft wraps a linear layer: the base weight frozen, a low-rank update beside it, merged on demand."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 8.0) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = alpha / rank
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y if self.merged else y + self.lora_B(self.lora_A(x)) * self.scaling

    @torch.no_grad()
    def merge(self) -> None:
        self.base_layer.weight.data += (
            self.lora_B.weight @ self.lora_A.weight * self.scaling
        )  # past the version counter
        self.merged = True


def lora() -> Any:
    model = mlp()
    for i in (0, 2):
        model[i] = LoRALinear(model[i], rank=4)
    x = torch.randn(ROWS, K)
    trained = step(model, x)
    for i in (0, 2):
        model[i].merge()
    with torch.inference_mode():
        return trained, model(x).clone()


# ---- quantised weights


class Int8Weight(Tensor):
    """A weight kept as int8 rows with a scale each, as torchao does it: a wrapper subclass that answers for aten."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, q.shape, strides=q.stride(), dtype=scale.dtype, device=q.device)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def of(cls, w: Tensor) -> Int8Weight:
        scale = w.abs().amax(1, keepdim=True) / 127
        return cls((w / scale).round().to(torch.int8), scale)

    def plain(self) -> Tensor:
        return self.q.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].q, args[0].scale)
        if func == aten.t.default:
            return cls(args[0].q.t(), args[0].scale.t())
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def int8_subclass() -> Any:
    model = mlp().eval()
    for i in (0, 2):
        model[i].weight = nn.Parameter(Int8Weight.of(model[i].weight.detach()), requires_grad=False)
    x = torch.randn(ROWS, K)
    with torch.no_grad():
        return model(x), model[0].weight @ x.t()


def torchao(config: str) -> Callable[[], Any]:
    def run() -> Any:
        from torchao import quantization

        model = mlp().bfloat16().eval()
        quantization.quantize_(model, getattr(quantization, config)())
        with torch.no_grad():
            return model(torch.randn(ROWS, K).bfloat16())

    return run


# ---- sharded over ranks


def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(1 + dist.get_rank())
    return step(model, torch.randn(ROWS, K))


def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return step(model, torch.randn(ROWS, K))


def dtensor_products() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    a, b = torch.randn(ROWS, K), torch.randn(K, N)
    placed = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())]
    return [(distribute_tensor(a, mesh, [p]) @ distribute_tensor(b, mesh, [q])).full_tensor() for p, q in placed]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "int8_subclass": int8_subclass,
    "torchao_weight_only": torchao("Int8WeightOnlyConfig"),
    "torchao_dynamic_activation": torchao("Int8DynamicActivationInt8WeightConfig"),
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "dtensor_products": dtensor_products,
}


def attempt(name: str) -> Any:
    torch.manual_seed(0)
    return PROGRAMS[name]()


def examine(name: str) -> dict[str, Any]:
    gemmtuned.disable()
    stock = (attempt(name), attempt(name))[1]
    gemmtuned.enable()
    hook = activate.current()
    assert hook is not None and hook.path == "native", hook and hook.note
    hook.stop()
    with profiled() as profile:
        captured = attempt(name)
    seen = counted(hook)
    backend = "torch_swap"
    rows = [published(p, backend) for p in seen if p.family in SERVED and tuple(BACKENDS[backend].candidates(p))]
    hook.tables.take_rows(1, [json.dumps(row.to_row()) for row in rows])
    routed = attempt(name)
    outcomes = {s.problem: s.outcome for s in hook.drain()}
    return {
        "calls": seen.total(),
        "problems": sorted(str(p).replace(",threads=2", "") for p in seen),
        "profiled": profile.gemms,
        "captured": difference(stock, captured, bits=True),
        "routed": difference(stock, routed, bits=False),
        "hits": sum(outcome == "exact" for outcome in outcomes.values()),
        "failures": [reason for _, reason in hook.native.failures()] if hook.native else [],
    }


def main() -> None:
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    if "RENDEZVOUS" in os.environ:
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", **place)
    print(json.dumps({name: examine(name) for name in sys.argv[1:]}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
