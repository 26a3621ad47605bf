"""What other people's programs do around matrix products, in a process without the hook and in one with it.

    python tests/foreign_programs.py OUT

Each program makes its own inputs and returns tensors, texts and numbers in any nesting: values, graphs, the calls that
a mode saw.  An exception and the warnings on the way are part of its outcome.  Two forks of one process run them all
twice; the hook of one counts the first time, and has a route for everything that it counted the second time.  `arrive`
is called in the middle of some: there a new table comes, where there is a hook.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import io
import logging
import operator
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from hooked import publish, published
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution
from gemmtuned.db import queries
from gemmtuned.hooks import activate
from gemmtuned.hooks.dispatch import SERVED
from gemmtuned.kernels.backends import BACKENDS

K, N, ROWS = 64, 48, 6
Outcome = dict[str, Any]
PROGRAMS: dict[str, Callable[[], Any]] = {}
ROUGH = (
    "torchao_int8_weight_only",
    "torchao_int8_dynamic_activation",
    "autocast_of_every_kind",
    "autograd_function_of_a_users_own",
)  # computed in bf16 or fp16, and given back as fp32
TABLE: list[Solution] = []
aten = torch.ops.aten


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[run.__name__] = run
    return run


def arrive() -> None:
    """A table of a new generation, with the rows of the last one, is taken up where the hook is on."""
    hook = activate.current()
    if hook is not None:
        publish(hook.settings.config_dir, TABLE, gemmtuned.generation() + 1)
        gemmtuned.reload()


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, N, bias=bias), nn.ReLU(), nn.Linear(N, K, bias=bias))


def rows(n: int = ROWS, k: int = K) -> Tensor:
    return torch.randn(n, k)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    (y.float() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def nodes(graph: Any) -> list[str]:
    """What a graph does, with whom: the identity of functions shows in their names."""
    return [
        f"{node.op} {node.target if isinstance(node.target, str) else resolve(node.target)}" for node in graph.nodes
    ]


def resolve(target: Any) -> str:
    if target is F.linear:
        return "F.linear itself"
    return str(resolve_name(target) or target)


# ---- quantisation


def torchao(config: str, *, compiled: bool = False) -> Callable[[], Any]:
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
    PROGRAMS["torchao_int8_weight_only"] = torchao("Int8WeightOnlyConfig")
    PROGRAMS["torchao_int8_dynamic_activation"] = torchao("Int8DynamicActivationInt8WeightConfig")


@program
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


@program
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


# ---- tracing


@program
def symbolic_trace():
    class Functional(nn.Module):
        def forward(self, x, w):
            return F.linear(x, w) @ w + torch.addmm(x, x, w.t() @ w) + torch.einsum("mk,nk->mn", x, w) @ w

    traced, x, w = torch.fx.symbolic_trace(Functional()), rows(), torch.randn(N, K)
    layers = torch.fx.symbolic_trace(mlp())
    return nodes(traced.graph), traced.code, traced(x, w), nodes(layers.graph), layers(x)


def products(x, w):
    return F.linear(x, w).relu() @ w + torch.addmm(x, x, w.t() @ w) - torch.bmm(x[None], (w.t() @ w)[None])[0]


@program
def make_fx_of_every_kind():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = rows(), torch.randn(N, K)
    made = [make_fx(products, tracing_mode=mode)(x, w) for mode in ("real", "fake", "symbolic")]
    arrive()
    made.append(make_fx(torch.func.functionalize(products))(x, w))
    made.append(make_fx(torch.func.grad(lambda x, w: products(x, w).sum()))(x, w))
    return [m.code for m in made], [m(x, w) for m in made]


@program
def export_and_decompose():
    model, x = mlp().eval(), rows()
    dynamic = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
    low = dynamic.run_decompositions()
    file = io.BytesIO()
    torch.export.save(dynamic, file)
    file.seek(0)
    loaded = torch.export.load(file)
    graphs = [str(e.graph_module.code) for e in (dynamic, low, loaded)]
    return graphs, [e.module()(x) for e in (dynamic, low, loaded)], low.module()(rows(9))


@program
def jit_trace_script_freeze_and_save():
    model, x = mlp().eval(), rows()
    traced, scripted = torch.jit.trace(model, x), torch.jit.script(model)
    function = torch.jit.script(products)
    frozen = torch.jit.freeze(scripted)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    made = [traced, scripted, frozen, torch.jit.load(file)]
    arrive()
    texts = [re.sub(r" #.*", "", str(m.inlined_graph)) for m in (traced, scripted)]
    return texts, [m(x) for m in made for _ in range(3)], function(x, torch.randn(N, K))


@program
def compiled_graphs_and_no_recompilation():
    seen: list[str] = []

    def backend(module, inputs):
        seen.append(module.code)
        return module.forward

    model, x, w = mlp(), rows(), torch.randn(N, K)
    calls = [
        torch.compile(products, backend=backend, fullgraph=True),
        torch.compile(products, backend="aot_eager", fullgraph=True),
        torch.compile(lambda x, w: model(x) @ w.t(), backend=backend),
    ]
    first = [f(x, w) for f in calls]
    arrive()
    with torch.compiler.set_stance("fail_on_recompile"):
        again = [f(x, w) for f in calls]
    torch.compiler.reset()
    explained = torch._dynamo.explain(products)(x, w)
    return seen, first, again, explained.graph_count, explained.graph_break_count, explained.op_count


@program
def compiled_training():
    model = mlp()
    made = torch.compile(model, backend="aot_eager")
    return step(made, rows()), step(made, rows())


# ---- transforms


@program
def function_transforms():
    from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

    model, x, w = mlp(), rows(), torch.randn(N, K)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(params, x):
        return functional_call(model, params, (x,)).square().sum()

    stacked, _ = stack_module_state([mlp() for _ in range(3)])
    many = vmap(lambda p, x: functional_call(model, p, (x,)), in_dims=(0, None))(stacked, x)
    y, pull = vjp(lambda x: F.linear(x, w), x)
    return [
        grad(loss)(params, x), vmap(grad(loss), in_dims=(None, 0))(params, x), many, y, pull(y),
        jvp(lambda x: F.linear(x, w).tanh(), (x,), (torch.ones_like(x),)),
        jacrev(lambda r: F.linear(r, w).tanh())(x[0]), jacfwd(lambda r: F.linear(r, w).tanh())(x[0]),
        hessian(lambda r: F.linear(r, w).square().sum())(x[0]),
        vmap(torch.mm)(x.expand(2, ROWS, K), w.t().expand(2, K, N)),
        vmap(torch.addmm, in_dims=(None, 0, None))(torch.zeros(ROWS, N), x.expand(2, ROWS, K), w.t()),
    ]  # fmt: skip


@program
def forward_mode_and_double_backward():
    from torch.autograd import forward_ad

    x, w = rows().requires_grad_(), torch.randn(N, K, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(F.linear(dual, w).sin()).tangent
    (gx,) = torch.autograd.grad(F.linear(x, w).square().sum(), x, create_graph=True)
    (gw,) = torch.autograd.grad(gx.square().sum(), w)
    return tangent, gx, gw


# ---- modes


class Seen(TorchDispatchMode):
    def __init__(self):
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __init__(self):
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(("linear! " if func is F.linear else "") + resolve(func))
        return func(*args, **(kwargs or {}))


@program
def dispatch_and_function_modes():
    model, x, w = mlp(), rows(), torch.randn(N, K)
    said = []
    for mode in (Seen(), Asked()):
        with mode:
            first = (step(model, x), products(x, w))
            arrive()
            products(x, w)
        said.append((mode.calls, first))
    return said


@program
def replacing_mode():
    class Double(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            return y * 2 if func in (aten.mm.default, aten.addmm.default) else y

    with Double():
        return mlp()(rows()), rows() @ torch.randn(K, N)


@program
def fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what it raises
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model, x = mlp(), rows()
        y = model(x)
        y.sum().backward()
        facts = [
            (type(t).__name__, tuple(t.shape), t.stride(), str(t.dtype))
            for t in (y, *(p.grad for p in model.parameters()))
        ]
    real = mode.from_tensor(rows())
    with mode:
        return facts, tuple(model(real).shape), torch.mm(real, real)  # the last raises


@program
def meta_device():
    model = mlp().to("meta")
    y = model(torch.empty(ROWS, K, device="meta"))
    with torch.device("meta"):
        inside = nn.Linear(K, N)(torch.empty(2, 3, K))
    loaded = model.to_empty(device="cpu")
    loaded.load_state_dict(mlp().state_dict(), assign=True)
    return str(y.device), tuple(y.shape), tuple(inside.shape), loaded(rows()), str(torch.mm(y, rows().t()).device)


@program
def flops_and_profile():
    from torch.profiler import profile
    from torch.utils.flop_counter import FlopCounterMode

    model, x, w = mlp(), rows(), torch.randn(N, K)
    with FlopCounterMode(display=False) as flops:
        step(model, x)
        products(x, w)
    with profile(record_shapes=True) as seen:
        step(model, x)
        products(x, w)
    gemms = ("aten::mm", "aten::addmm", "aten::bmm")

    def inside(event):  # what a route calls in the place of torch's own
        while event.cpu_parent is not None:
            event = event.cpu_parent
            if event.name in gemms:
                return True
        return False

    events = [f"{e.name} {e.input_shapes}" for e in seen.events() if not inside(e)]
    return flops.get_table(), flops.get_total_flops(), events


# ---- training


@program
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


@program
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


# ---- extensions of torch


@program
def operator_of_a_users_own():
    @torch.library.custom_op("foreign::product", mutates_args=())
    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w.t())

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
    product.register_autograd(
        lambda ctx, g: (g @ ctx.saved_tensors[1], g.t() @ ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x, w = rows().requires_grad_(), torch.randn(N, K, requires_grad=True)
    y = torch.compile(product, backend="aot_eager", fullgraph=True)(x, w)
    y.square().sum().backward()
    said = torch.library.opcheck(product, (x.detach(), w.detach()))
    return y, x.grad, w.grad, said


@program
def autograd_function_of_a_users_own():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.t() @ x

    x, w = rows().requires_grad_(), torch.randn(N, K, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Product.apply(x, w)
    y.float().square().sum().backward()
    return y, x.grad, w.grad


@program
def what_torch_says_of_its_functions():
    overridable = torch.overrides.get_overridable_functions()
    known = [f in overridable[m] for m, f in ((torch, torch.mm), (F, F.linear), (Tensor, Tensor.matmul))]
    return (
        known, repr(F.linear), repr(torch.mm), F.linear is torch._C._nn.linear, type(F.linear).__name__,
        inspect.isbuiltin(F.linear), F.linear.__name__, (F.linear.__doc__ or "")[:60],
        [str(aten.mm.overloads()), str(aten.mm.default._schema), str(aten.mm.default.tags)],
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "CPU"),
        aten.linear.default.has_kernel_for_dispatch_key("Meta"),
        operator.matmul(rows(), rows().t()),
    )  # fmt: skip


# ---- processes and threads


class Products(torch.utils.data.Dataset):
    def __init__(self):
        self.weight = torch.randn(N, K)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return F.linear(torch.full((2, K), float(i)), self.weight)


def tell_worker(worker: int) -> None:
    torch.manual_seed(worker)


@program
def data_loader_with_workers():
    from torch.utils.data import DataLoader

    data = Products()
    said = []
    for _ in range(2):
        said.append(list(DataLoader(data, 3, num_workers=2, worker_init_fn=tell_worker, persistent_workers=True)))
        arrive()
    return said


@program
def threads_that_train():
    torch.manual_seed(0)
    models, x = [mlp() for _ in range(4)], rows()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda m: step(m, x), models))
    return found, [t.name for t in threading.enumerate()]


@program
def server_that_forks_its_workers():
    """As gunicorn: the master loads the model, forks, reaps, and ends its workers with a signal."""
    import signal
    import socket

    model = mlp().eval()
    model(rows())
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(16)

    def worker():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        torch.set_num_threads(1)  # the threads of OpenMP did not come along
        while True:
            connection, _ = listening.accept()
            seed = connection.recv(8)[0]
            with torch.no_grad():
                y = model(torch.full((ROWS, K), float(seed)))
            connection.sendall(pickle.dumps(y.tolist()))
            connection.close()

    workers = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            worker()
        workers.append(pid)
    answers = []
    for seed in range(9):
        with socket.create_connection(listening.getsockname(), timeout=20) as connection:
            connection.sendall(bytes([seed]))
            answers.append(torch.tensor(pickle.loads(b"".join(iter(lambda: connection.recv(65536), b"")))))
        if seed == 4:
            arrive()
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    ends = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in workers)
    try:
        os.wait()
        ends.append("one child more")
    except ChildProcessError:
        pass
    listening.close()
    return answers, ends


# ---- running


def outcome(run: Callable[[], Any]) -> Outcome:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            value = run()
        except Exception as err:
            value = f"{type(err).__name__}: {plain(str(err))}"
    value = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)
    words = [f"{w.category.__name__}: {plain(str(w.message))}" for w in told]
    return {"value": tree_map_only(str, plain, value), "warnings": words}


def plain(text: str) -> str:
    """Without addresses, which are others in each process."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


def plant() -> int:
    """Publish and take up a route for each problem that was counted, of three backends in turn; how many."""
    hook = activate.current()
    assert hook is not None and hook.path == "native", hook and hook.note
    hook.flusher.flush()
    sql = "SELECT DISTINCT p.text FROM every_sighting s JOIN problem p ON p.id = s.problem_id ORDER BY p.text"
    problems = [Problem.parse(row["text"]) for row in queries.ask(hook.settings.db, sql)]
    for i, problem in enumerate(problems):
        takes = [b for b in ("torch_swap", "onednn", "torch_mv") if tuple(BACKENDS[b].candidates(problem))]
        if problem.family in SERVED and takes:
            TABLE.append(published(problem, takes[i % len(takes)]))
    arrive()
    return len(TABLE)


def calls(outcome: str) -> int:
    hook = activate.current()
    assert hook is not None
    hook.flusher.flush()
    (row,) = queries.ask(
        hook.settings.db,
        "SELECT sum(calls) AS calls FROM every_sighting WHERE outcome = :outcome",
        {"outcome": outcome},
    )
    return row["calls"] or 0


def everything(out: Path, *, on: bool) -> None:
    torch.set_num_threads(2)
    said: dict[str, Any] = {}
    if on:
        gemmtuned.enable()
    said["first"] = {name: outcome(run) for name, run in PROGRAMS.items()}
    if on:
        said["counted"], said["routes"] = calls("miss"), plant()
    said["second"] = {name: outcome(run) for name, run in PROGRAMS.items()}
    if on:
        said["served"], said["failed"] = calls("exact"), activate.current().tables.failed  # type: ignore[union-attr]
    torch.save(said, out)


def main() -> None:
    for module in ("torch._dynamo", "torch.export", "torch.ao.quantization.quantize_fx", "torchao.quantization"):
        with suppress(ImportError):
            importlib.import_module(module)
    children = {}
    for name in ("off", "on"):
        pid = os.fork()
        if pid == 0:
            everything(Path(sys.argv[1]) / name, on=name == "on")
            return
        children[pid] = name
    for _ in tuple(children):
        pid, status = os.wait()
        if status:
            print(f"{children[pid]} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)


if __name__ == "__main__":
    main()
