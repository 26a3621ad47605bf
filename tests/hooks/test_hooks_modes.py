"""Kernels of ours that are called past the dispatcher, as AOTInductor does, while modes and transforms are on."""

from __future__ import annotations

from dataclasses import replace

from hooked import LINEAR, Home, publish, published

FORMS = {  # what a program calls -> its problem, the route that serves it
    "mm": (LINEAR, "torch_swap"),
    "row": (replace(LINEAR, m=1), "torch_mv"),
    "addmm": (replace(LINEAR, bias=True), "onednn"),
}
PROGRAM = """
    import json, torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from programs_counted import counted
    import gemmtuned
    from gemmtuned.hooks import activate

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    assert gemmtuned.ready(30)
    hook = activate.current()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    mm, addmm, bmm = (getattr(torch.ops.aten, name).default.redispatch for name in ("mm", "addmm", "bmm"))
    x, w, c, one = torch.randn(4, 16), torch.randn(8, 16).t(), torch.randn(8), torch.randn(1, 16)
    batch, of_batch = x.unsqueeze(0), w.unsqueeze(0)
    calls = {"mm": lambda: mm(keys, x, w), "row": lambda: mm(keys, one, w), "addmm": lambda: addmm(keys, c, x, w),
             "bmm": lambda: bmm(keys, batch, of_batch)}
"""


def test_a_mode_sees_nothing_of_what_we_do_inside_of_a_kernel(home: Home) -> None:
    """Counting, it sees what it sees without us; of a route it sees nothing."""
    look = """
    said = {}
    for switch in (gemmtuned.disable, lambda: gemmtuned.enable(dispatch=False), gemmtuned.enable):
        switch()
        assert gemmtuned.ready(30)
        said[gemmtuned.generation()] = told = {}
        for name, call in calls.items():
            seen = []
            with Seen():
                call()
            told[name] = seen
            hook = activate.current()
            if hook and gemmtuned.generation():
                told[name] = [seen, sorted(s.outcome for s in hook.native.drain())]
        said.setdefault("all", []).append(told)
    print(json.dumps(said["all"]))
    """
    home.path.mkdir()
    publish(home.path / "configs", [published(problem, backend) for problem, backend in FORMS.values()], 1)
    off, counting, routed = home.compiling().run(PROGRAM + look, GEMMTUNED_FLUSH_S="1000").said

    assert counting == off
    assert routed == {name: [[], ["exact"]] for name in (*FORMS, "bmm")}


def test_a_mode_sees_nothing_of_what_we_look_at_of_an_engines_operator(home: Home) -> None:
    """One that has W and its scales by rows."""
    said = home.run(
        PROGRAM
        + """
    from gemmtuned.hooks.engine_operators import operators
    vllm = torch.library.Library("vllm", "DEF")
    vllm.define("fp8_gemm_nt_op(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, "
                "Tensor(a!) output, bool use_deep_gemm_e8m0) -> ()")
    vllm.impl("fp8_gemm_nt_op", lambda *given: None, "CPU")
    [one] = [operator for operator in operators() if operator.name == "vllm::fp8_gemm_nt_op"]
    stands = hook.native.stand_before(one.name, one.schema, one.arguments, one.code)
    x8, w8 = (torch.zeros(rows, 256).to(torch.float8_e4m3fn) for rows in (4, 256))
    sx, sw, out, seen = torch.ones(4, 2), torch.ones(2, 2), torch.zeros(4, 256, dtype=torch.bfloat16), []
    with Seen():
        torch.ops.vllm.fp8_gemm_nt_op.default.redispatch(keys, x8, sx, w8, sw, out, False)
    print(json.dumps([stands, seen, [s.problem.scale for s in hook.native.drain()]]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    ).said
    assert said == [["CPU vllm::fp8_gemm_nt_op"], [], ["1x128"]]


def test_operands_that_torch_refuses_too_are_no_fault_of_a_route(home: Home) -> None:
    """Here a transform's wrapper, whose memory nobody may read.  What torch takes still tells of a broken route."""
    look = """
    def refused(tensor):
        try:
            mm(keys, tensor, w)
        except RuntimeError as err:
            return str(err)

    said = []
    torch.func.grad(lambda t: [said.append(refused(t)), t.sum()][1])(x)
    list(hook.native.drain())
    mm(keys, x, w)
    print(json.dumps([said, [s.outcome for s in hook.native.drain()]]))
    """
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.compiling().run(PROGRAM + look, GEMMTUNED_FLUSH_S="1000")
    (said,), outcomes = done.said

    assert said and outcomes == ["exact"]
    assert done.ours == []


def test_a_wrapper_without_data_is_asked_no_more_than_torch_asks_it(home: Home) -> None:
    """A subclass whose Python code tells its sizes, in code that keeps modes and subclasses out."""
    done = home.compiling().run(
        """
    import json, torch, gemmtuned
    asked = []

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes"
            )

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            asked.append(str(function))
            return function(*(arg.inner if isinstance(arg, cls) else arg for arg in args))

    said = []
    for switch in (lambda: None, gemmtuned.disable):
        switch()
        for call in (lambda x: torch.mm(x, w), lambda x: torch.addmm(w, w, x)):
            w, wrapped, asked = torch.randn(16, 16), Wrapper(torch.randn(16, 16)), []
            try:
                with torch._C._DisableTorchDispatch():
                    call(wrapped)
            except RuntimeError as err:
                said.append([asked, str(err)])
    print(json.dumps(said))
        """
    )
    on, off = done.said[:2], done.said[2:]

    assert on == off and len(off) == 2
