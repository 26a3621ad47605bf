"""Programs that quantise and train models; see foreign_running.py."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from foreign_running import (
    PROGRAMS,
    K,
    N,
    Program,
    arrive,
    aten,
    coarse_program,
    mlp,
    nodes,
    outcome,
    program,
    rows,
    step,
)
from torch import Tensor, nn

# ---- quantisation


def torchao(config: str) -> Callable[[], Any]:
    def run() -> Any:
        from torchao import quantization

        model = mlp().bfloat16().eval()
        quantization.quantize_(model, getattr(quantization, config)())
        x = rows().bfloat16()
        with torch.no_grad():
            first = model(x)
            arrive()
            again = copy.deepcopy(model)(x)
            state = model.state_dict()
        return first, again, [type(p).__name__ for p in model.parameters()], sorted(state), str(model)

    return run


if find_spec("torchao"):
    for config in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        PROGRAMS[f"torchao_{config}"] = Program(torchao(config), torch.bfloat16)


@coarse_program
def fx_quantisation():
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(N, K))

        def forward(self, x):
            return F.relu(F.linear(x, self.weight))

    x = rows()
    prepared = prepare_fx(Functional().eval(), get_default_qconfig_mapping(torch.backends.quantized.engine), (x,))
    prepared(x)
    converted = convert_fx(prepared)
    return nodes(prepared.graph), nodes(converted.graph), converted(x)


@coarse_program
def dynamic_quantisation():
    from torch.ao.quantization import quantize_dynamic

    made = quantize_dynamic(mlp().eval(), {nn.Linear}, dtype=torch.qint8)
    return made(rows()), str(made)


class Wrapped(Tensor):
    """As torch's documentation writes a subclass: a table keyed by the functions of torch."""

    TABLE: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return "Wrapped"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in cls.TABLE:
            return cls.TABLE[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].inner)
        raise NotImplementedError(f"Wrapped does not know {func}")


Wrapped.TABLE[F.linear] = lambda x, w, b=None: F.linear(x, w.inner, b) + 1


@program
def subclass_with_a_table_of_functions():
    model = mlp()
    model[0].weight = nn.Parameter(Wrapped(model[0].weight.detach()), requires_grad=False)
    y = model(rows())
    arrive()
    return y, model(rows()), rows() @ model[0].weight.t()  # the last raises


# ---- training


@coarse_program
def autocast_of_every_kind():
    model, x = mlp(), rows()
    said = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            said += [step(model, x), model(x) @ x.t(), torch.mm(x, x.t())]
            with torch.autocast("cpu", enabled=False):
                said.append(model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.inference_mode():
        said.append(model(x).clone())
    return said


@program
def checkpointed():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    said = []
    for reentrant in (True, False):
        model, x = mlp(), rows().requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant)
        arrive()
        y.square().sum().backward()
        said.append([y, x.grad, *(p.grad for p in model.parameters())])
    asked = []

    def policy(context, op, *args, **kwargs):
        asked.append(str(op))
        return CheckpointPolicy.MUST_SAVE if op == aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = mlp(), rows().requires_grad_()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
    return said, asked, x.grad


@coarse_program
def storage_taken_away_and_given_back():
    """As FSDP shards: the storage of a parameter has no memory between two uses."""
    model, x = mlp(), rows()
    said = []
    for i in range(3):
        for p in model.parameters():
            kept = p.detach().clone()
            p.untyped_storage().resize_(0)
            p.untyped_storage().resize_(kept.nbytes)
            with torch.no_grad():
                p.copy_(kept * (1 + i))
        said.append(step(model, x))
        arrive()
        model[0].weight.data = torch.empty(0)
        model[0].weight.data = torch.full((N, K), 0.25 * i)
        said.append(model(x))
    model.half().float()
    return said, model(x)


@program
def copies_pickles_and_optimizers():
    model, x = mlp(), rows()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.optim.AdamW(model.parameters(), 0.01)]
    for optimizer in optimizers:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model, "optimizers": [o.state_dict() for o in optimizers]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded["model"]]
    functions = pickle.loads(pickle.dumps([F.linear, torch.mm, torch.matmul, Tensor.matmul]))
    same = [a is b for a, b in zip(functions, (F.linear, torch.mm, torch.matmul, Tensor.matmul), strict=True)]
    return [c(x) for c in copies], loaded["optimizers"], same


@program
def hooks_in_their_order():
    model, x, told = mlp(), rows().requires_grad_(), []
    for i, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda m, a, i=i: told.append(f"before {i} {tuple(a[0].shape)}"))
        layer.register_forward_hook(lambda m, a, y, i=i: told.append(f"after {i} {y.grad_fn.name()}"))
        layer.register_full_backward_hook(lambda m, gi, go, i=i: told.append(f"backward {i}"))
    model[0].weight.register_hook(lambda g: told.append("gradient") or g * 2)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: told.append("accumulated"))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
        found = step(model, x)
    return found, x.grad, told, packed


@program
def parametrizations_and_norms():
    from torch.nn.utils import parametrizations, parametrize, prune

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    made = [
        parametrizations.weight_norm(nn.Linear(K, N)), parametrizations.spectral_norm(nn.Linear(K, N)),
        parametrizations.orthogonal(nn.Linear(K, K)),
        parametrize.register_parametrization(nn.Linear(K, K), "weight", Symmetric()),
        prune.l1_unstructured(nn.Linear(K, N), "weight", 0.5), torch.nn.utils.weight_norm(nn.Linear(K, N)),
    ]  # fmt: skip
    lazy = nn.LazyLinear(N)
    return [step(m, rows()) for m in made], lazy(rows()), str(lazy), [sorted(m.state_dict()) for m in made]


@program
def whole_networks():
    transformer = nn.TransformerEncoderLayer(K, 4, 2 * K, batch_first=True, dropout=0.0)
    lstm, gru = nn.LSTM(K, N, 2, bidirectional=True), nn.GRU(K, N)
    x = torch.randn(5, 3, K)
    said = [step(transformer, x), lstm(x)[0], gru(x)[0], nn.Bilinear(K, K, N)(rows(), rows())]
    with torch.inference_mode():
        said.append(transformer.eval()(x).clone())
    return said


@program
def anomalies_and_errors():
    w = torch.randn(N, K, requires_grad=True)

    def wrong():
        with torch.autograd.detect_anomaly():
            y = F.linear(rows(), w)
            (y / 0 * 0).sqrt().sum().backward()

    runs = (
        wrong,
        lambda: F.linear(rows(), torch.randn(N, K + 1)),
        lambda: torch.mm(rows(), rows()),
        lambda: torch.mm(rows(), torch.randn(K, N), out=torch.empty(2, dtype=torch.int8)),
        lambda: torch.addmm(torch.randn(3), rows(), torch.randn(K, N)),
        lambda: torch.bmm(rows(), rows()),
        lambda: rows() @ "x",
        lambda: F.linear(rows(), None),
        lambda: torch.mm(rows(), torch.randn(K, N).double()),
        lambda: nn.Linear(K, N)(rows().half()),
        lambda: torch.mm(rows(), torch.randn(K, N), out=torch.empty(9, 9)),
    )
    return [outcome(run)["value"] for run in runs]
