"""A frozen layer is a linear layer to whatever is done with it."""

from dataclasses import replace

import pytest
from frozen_program import START
from hooked import LINEAR, Home, publish, published

PACKED = replace(LINEAR, bias=True, weight_state="packed")


TRANSFORMS = """
    import torch.autograd.forward_ad as fwAD
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen = func
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is nn.functional.linear:
                return "mine"
            return super().__torch_function__(func, types, args, kwargs or {})

    m, twin = model(), model()
    twin.load_state_dict(m.state_dict())
    gemmtuned.freeze(m)
    t = torch.randn(4, 16)
    said = {}

    def both(name, run):
        said[name] = [run(m), run(twin)]

    def dual(net):
        with fwAD.dual_level():
            return fwAD.unpack_dual(net(fwAD.make_dual(x, t))).tangent.sum().item()

    def functions(net):
        with Functions() as mode:
            net(x)
        return mode.seen is nn.functional.linear

    def operators(net):
        with Operators() as mode:
            net(x)
        return mode.seen

    def flops(net):
        with FlopCounterMode(display=False) as mode:
            net(x)
        return mode.get_total_flops()

    def quietly(run):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return run()

    with torch.no_grad():
        both("dual", dual)
        both("jvp", lambda net: torch.func.jvp(net, (x,), (t,))[1].sum().item())
        both("vmap", lambda net: torch.vmap(net)(x.unsqueeze(1)).sum().item())
        both("functions", functions)
        both("operators", operators)
        both("flops", flops)
        both("subclass", lambda net: net(x.as_subclass(Mine)))
        both("make_fx", lambda net: [str(n.target) for n in make_fx(net)(x).graph.nodes])
        both("leaf", lambda net: [n.op for n in torch.fx.symbolic_trace(net).graph.nodes])
        both("trace", lambda net: quietly(lambda: torch.jit.trace(net, x))(x).shape == (4, 8))
        compiled = lambda net: torch.compile(torch.vmap(net), backend="aot_eager")
        both("compiled vmap", lambda net: compiled(net)(x.unsqueeze(1)).sum().item())
        counts()
        m(x)
        said["packed still"] = [counts()]
        both("script", lambda net: quietly(lambda: torch.jit.script(net))(x).shape == (4, 8))
    both("grad", lambda net: torch.func.grad(lambda v: net(v).sum())(x).sum().item())
    m = model()
    twin.load_state_dict(m.state_dict())
    gemmtuned.freeze(m)
    kept = m[0].__dict__["_gemmtuned_packed"]
    def operator(v):
        return torch.ops.gemmtuned.frozen_linear(v, m[0].weight, kept.packed, m[0].bias, kept.fingerprint)

    with torch.no_grad():
        said["the operator, derived"] = [
            torch.func.jvp(f, (x,), (t,))[1].sum().item() for f in (operator, twin)
        ]
        said["the operator, mapped"] = [torch.vmap(f)(x.unsqueeze(1)).sum().item() for f in (operator, twin)]
    print(json.dumps(said))
    """


@pytest.mark.long
def test_a_frozen_layer_is_linear_to_transforms_tracers_and_modes(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(PACKED, "onednn_packed")], 1)
    done = home.run(
        START + TRANSFORMS,
        GEMMTUNED_RELOAD="manual",
    )
    said = done.said

    assert said.pop("packed still") == [{"fp32:4x8x16+bias,weight=packed exact": 1}]
    for name, (frozen, plain) in said.items():
        if isinstance(plain, float):
            assert abs(frozen - plain) < 1e-3, name
            assert plain != 0.0, name
        else:
            assert frozen == plain, name
    assert "performance drop" not in done.err


WHATEVER = """
    warnings.simplefilter("ignore")

    class Triple(nn.Module):
        def forward(self, w):
            return 3 * w

    def parametrized(net):
        nn.utils.parametrize.register_parametrization(net[0], "weight", Triple())
        return net

    def weight(net, w):
        net[0].weight = nn.Parameter(w, requires_grad=False)
        return net(x)

    def swapped_on_conversion(net):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return net.double().float()(x)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def swapped(net):
        torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.ones(8, 16)))
        return net(x)

    def same_memory(net):
        net[0].weight = nn.Parameter(net[0].weight.data)
        before = net(x)
        net[0].weight.mul_(2)
        return torch.stack([before, net(x)])

    def kind(run):
        try:
            return run()
        except Exception as err:
            return type(err).__name__

    TRIALS = {
        "deepcopy of a parametrized one": lambda net: copy.deepcopy(parametrized(net))(x),
        "pickle of a parametrized one": lambda net: kind(lambda: pickle.loads(pickle.dumps(parametrized(net)))(x)),
        "a sparse input": lambda net: net(x.to_sparse()),
        "an input in oneDNN's form": lambda net: net(x.to_mkldnn()).to_dense(),
        "a sparse weight": lambda net: weight(net, torch.ones(8, 16).to_sparse_csr()),
        "a weight in oneDNN's form": lambda net: weight(net, torch.ones(8, 16).to_mkldnn()),
        "a weight of another class": lambda net: type(weight(net, torch.ones(8, 16).as_subclass(Mine))).__name__,
        "conversion by swapping": swapped_on_conversion,
        "swap_tensors": swapped,
        "another parameter of the same memory": same_memory,
        "torch.export": lambda net: torch.export.export(net, (x,), strict=True).module()(x),
        "what it exports": lambda net: [str(n.target) for n in torch.export.export(net, (x,), strict=True).graph.nodes],
    }

    class Mine(torch.Tensor):
        pass

    said = {}
    with torch.no_grad():
        for name, run in TRIALS.items():
            m, twin = model(), model()
            twin.load_state_dict(m.state_dict())
            assert gemmtuned.freeze(m) == 1
            m(x)
            found, expected = kind(lambda: run(m)), kind(lambda: run(twin))
            if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
                found, expected = torch.allclose(found, expected, atol=1e-5), True
            if found != expected:
                said[name] = [str(found), str(expected)]
        counts()
        m = model()
        gemmtuned.freeze(m)
        m(x)
    print(json.dumps([said, counts()]))
    """


@pytest.mark.long
def test_a_frozen_layer_is_linear_to_whatever_is_done_with_it(home: Home) -> None:
    """Each of these gave another result, or an error, than the same layer that is not frozen."""
    home.path.mkdir()
    publish(home.path / "configs", [published(PACKED, "onednn_packed")], 1)
    done = home.run(
        START + WHATEVER,
        GEMMTUNED_RELOAD="manual",
    )
    assert done.said == [{}, {"fp32:4x8x16+bias,weight=packed exact": 1}]
