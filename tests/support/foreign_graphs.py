"""Programs that trace, export, compile, transform and watch matrix products; see foreign_running.py."""

from __future__ import annotations

import io
import logging
import re

import torch
import torch.nn.functional as F
from foreign_running import ROWS, K, N, arrive, aten, mlp, nodes, program, resolve, rows, step
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
    texts = [re.sub(r" #.*|___torch_mangle_\d+", "", str(m.inlined_graph)) for m in (traced, scripted)]
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
