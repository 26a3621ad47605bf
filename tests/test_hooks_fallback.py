"""The path without a compiler: F.linear replaced, counted and routed in Python, until the native hook is there."""

import os
import shutil
from pathlib import Path

from hooked import HERE, LINEAR, Home, publish, published

from gemmtuned.hooks.native.build import build, library_path

START = """
    import json, torch
    import torch.nn.functional as F
    from torch.nn.functional import linear as early
    from hooked import wait_for
    import gemmtuned
    from gemmtuned.hooks import activate
    hook = activate.current()
    stock = F.linear.__wrapped__
    x, w, b = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)

    def counts():
        sums = {}
        for s in hook.fallback.drain():
            key = f"{s.problem} {s.outcome}".replace(",threads=2", "")
            sums[key] = sums.get(key, 0) + s.calls
        return sums
    """


def test_calls_of_linear_are_counted_as_the_native_hook_would(home: Home) -> None:
    done = home.run(
        START
        + """
    hook.flusher.stop()
    counts()
    said = []

    def check(run):
        found = run(F.linear)
        right = run(stock)
        same = torch.equal(found, right) and found.stride() == right.stride() and found.dtype is right.dtype
        said.append([same, counts()])

    check(lambda f: f(x, w))
    check(lambda f: f(x.view(2, 2, 16), w, bias=b))
    check(lambda f: f(input=x, weight=torch.nn.Parameter(w)))
    check(lambda f: f(x, w.t().contiguous().t()))
    check(lambda f: f(torch.randn(16, 5, generator=torch.Generator().manual_seed(1)).t(), w))
    check(lambda f: f(x[0], w))
    check(lambda f: f(x[:0], w))
    check(lambda f: f(x.to(torch.int32), w.to(torch.int32)))
    with torch.inference_mode():
        check(lambda f: f(x, w))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(lambda f: f(x, w, b))
        check(lambda f: f(x.double(), w.double()))
    check(lambda f: torch.vmap(lambda row: f(row, w))(x))
    check(lambda f: torch.func.grad(lambda v: f(v, w).sum())(x))

    for wrong in ((x, w.t()), (x, w.double()), (x, w, b[:3]), (None, w), (x.tolist(), w)):
        errors = []
        for f in (F.linear, stock):
            try:
                f(*wrong)
            except Exception as err:
                errors.append(f"{type(err).__name__}: {err}")
        said.append([len(errors) == 2 and errors[0] == errors[1], counts()])
    early(x, w)
    said.append([True, counts()])
    print(json.dumps(said))
    """,
        GEMMTUNED_NATIVE="0",
    )
    one = "fp32:4x8x16 miss"

    assert done.said == [
        [True, {one: 1}],
        [True, {"fp32:4x8x16+bias miss": 1}],
        [True, {one: 1}],
        [True, {"fp32:4x8x16,layout=nn miss": 1}],
        [True, {"fp32:5x8x16,layout=tt miss": 1}],
        [True, {}],
        [True, {}],
        [True, {"i32:4x8x16 miss": 1}],
        [True, {one: 1}],
        [True, {"bf16:4x8x16+bias miss": 1}],
        [True, {"fp64:4x8x16 miss": 1}],
        [True, {}],  # inside vmap sizes are not the kernel's
        [True, {one: 1}],
        [True, {}],
        [True, {"fp32:4x8x16 miss": 1}],  # mixed dtypes: counted before torch refuses
        *[[True, {}]] * 3,
        [True, {one: 1}],
    ]


def test_routes_serve_plain_calls_and_leave_the_others_to_torch(home: Home) -> None:
    home.path.mkdir()
    fails = published(LINEAR.with_m(7), "onednn", config='{"no":"such"}')  # the backend refuses this config
    rows = [published(LINEAR, "torch_swap"), published(LINEAR.with_m(6), "torch", state="default_best"), fails]
    publish(home.path / "configs", rows, 1)
    done = home.run(
        START
        + """
    hook.flusher.stop()
    gemmtuned.reload()
    counts()
    swapped = stock(w, x).t()
    y = F.linear(x, w)
    said = [[torch.equal(y, swapped), y.is_contiguous(), F.linear(x.view(2, 2, 16), w).shape == (2, 2, 8)], counts()]
    with torch.inference_mode():
        said += [torch.equal(F.linear(x, w), swapped), counts()]
    p = w.clone().requires_grad_()
    F.linear(x, p).sum().backward()
    said += [torch.allclose(p.grad, x.sum(0).expand(8, 16)), counts()]
    with torch.no_grad():
        said += [torch.equal(F.linear(x, p), swapped), counts()]
    with torch.autocast("cpu"):
        said += [F.linear(x, w).dtype is torch.bfloat16, counts()]
    said += [torch.equal(F.linear(x[:, :].repeat(2, 1)[:6], w), stock(x.repeat(2, 1)[:6], w)), counts()]
    said += [[torch.equal(F.linear(x.repeat(2, 1)[:7], w), stock(x.repeat(2, 1)[:7], w)) for _ in range(3)], counts()]
    hook.tick()
    hook.tick()
    hook.native = None
    threads_before = sum(F.linear(x, w) is not None for _ in range(100))
    said += [threads_before, counts(), gemmtuned.status()["errors"]]
    print(json.dumps(said))
    """,
        GEMMTUNED_NATIVE="0",
        GEMMTUNED_RELOAD="manual",
    )
    hit, miss = "fp32:4x8x16 exact", "fp32:4x8x16 miss"

    assert done.said == [
        [True, True, True], {hit: 2},
        True, {hit: 1},
        True, {miss: 1},
        True, {hit: 1},
        True, {"bf16:4x8x16 miss": 1},
        True, {"fp32:6x8x16 exact": 1},
        [True, True, True], {"fp32:7x8x16 miss": 3},
        100, {hit: 100}, 1,
    ]  # fmt: skip
    assert len(done.ours) == 1
    assert "route failed problem=fp32:7x8x16,threads=2" in done.ours[0]


MODEL = """
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)

    def forward(self, x):
        return F.linear(x, self.layer.weight) + self.layer(x)
"""


def test_it_stands_for_linear_in_every_use_of_the_function(home: Home, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)  # torch.jit.script wants source
    done = home.run(
        START
        + """
    import copy, pickle
    from model import Model
    hook.flusher.stop()
    counts()
    model = Model().eval()
    right = stock(x, model.layer.weight) + stock(x, model.layer.weight, model.layer.bias)
    same = {}
    with torch.no_grad():
        same["eager"] = model(x)
        seen = counts()
        same["pickle"] = pickle.loads(pickle.dumps(copy.deepcopy(model.layer)))(x) + stock(x, model.layer.weight)
        same["trace"] = torch.jit.trace(model, x)(x)
        counts()
        same["script"] = torch.jit.script(model)(x)
        graph = torch.fx.symbolic_trace(model)
        same["fx"] = graph(x)
        counts()
        same["export"] = torch.export.export(model, (x,)).module()(x)
        same["compile"] = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    with torch._subclasses.FakeTensorMode():
        F.linear(torch.empty(4, 16), torch.empty(8, 16))
    traced = counts()
    pickled = pickle.loads(pickle.dumps(F.linear)) is F.linear
    nodes = [n.op for n in graph.graph.nodes]
    same = [name for name, y in same.items() if not torch.allclose(y, right, atol=1e-6)]
    print(json.dumps([same, seen, traced, pickled, F.linear.__doc__ == stock.__doc__, nodes]))
    """,
        GEMMTUNED_NATIVE="0",
        PYTHONPATH=os.pathsep.join([str(HERE), str(tmp_path)]),
    )
    wrong, seen, traced, pickled, doc, nodes = done.said
    assert "TracerWarning" not in done.err

    assert wrong == []
    assert seen == {"fp32:4x8x16 miss": 1, "fp32:4x8x16+bias miss": 1}
    assert traced == {}, "what is traced, compiled or fake is no call"
    assert pickled
    assert doc
    assert nodes == ["placeholder", "get_attr", "call_function", "call_module", "call_function", "output"]


def test_threads_lose_no_counts(home: Home) -> None:
    done = home.run(
        START
        + """
    import sys, threading, time
    hook.flusher.stop()
    counts()
    sys.setswitchinterval(1e-6)
    stop, sums = threading.Event(), {}

    def drain():
        while not stop.is_set():
            for key, calls in counts().items():
                sums[key] = sums.get(key, 0) + calls
            hook.fallback.load(hook.table)  # as a reload does
            time.sleep(0.1)  # a call that holds a cell has counted in it by the next drain but one

    def work():
        for _ in range(5000):
            F.linear(x, w)

    threads, drainer = [threading.Thread(target=work) for _ in range(8)], threading.Thread(target=drain)
    drainer.start()
    [t.start() for t in threads]
    [t.join() for t in threads]
    stop.set()
    drainer.join()
    for _ in range(2):
        for key, calls in counts().items():
            sums[key] = sums.get(key, 0) + calls
    print(json.dumps(sums))
    """,
        GEMMTUNED_NATIVE="0",
    )

    assert done.said == {"fp32:4x8x16 miss": 40_000}


COMPILER = """#!/bin/sh
# stands for g++: the real one makes {built} in the tests' set-up, which this one hands out
while [ "$1" != "-o" ]; do shift; done
sleep 0.5
{action}
"""


def compiler(folder: Path, built: Path, action: str) -> str:
    folder.mkdir()
    (folder / "g++").write_text(COMPILER.format(built=built, action=action))
    (folder / "g++").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_the_native_hook_takes_over_in_a_running_process_when_its_build_is_done(home: Home, tmp_path: Path) -> None:
    built = build(home.cache)
    done = home.run(
        START
        + """
    said = [gemmtuned.status()["path"], gemmtuned.status()["note"]]
    calls = 0
    while gemmtuned.status()["path"] == "fallback":
        early(x, w)
        calls += 1
    for _ in range(1000):
        early(x, w)  # the wrapper, kept by somebody: now below it the native hook counts
        F.linear(x, w)
    said += [gemmtuned.status()["path"], gemmtuned.status()["note"], type(F.linear).__name__, calls + 2000]
    print(json.dumps(said))
    """,
        PATH=compiler(tmp_path / "bin", built, f'cp "{built}" "$2"'),
        GEMMTUNED_CACHE=str(tmp_path / "cache"),
    )
    path, note, path_after, note_after, kind, calls = done.said

    assert (path, note) == ("fallback", "native hook is being built")
    assert (path_after, note_after, kind) == ("native", "", "builtin_function_or_method")
    # one call may be on its way through each path at the moment of the change
    assert abs(home.calls() - calls) <= 1
    assert done.err == ""
    assert library_path(tmp_path / "cache").is_file()  # type: ignore[union-attr]


def test_a_build_that_fails_is_said_and_not_tried_again(home: Home, tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", build(home.cache), 'echo "x.cpp:1: error: no such thing" >&2; exit 1')
    code = (
        START
        + """
    wait_for(lambda: gemmtuned.status()["note"] != "native hook is being built")
    F.linear(x, w)
    print(json.dumps([gemmtuned.status()["path"], gemmtuned.status()["note"]]))
    """
    )
    first = home.run(code, PATH=path, GEMMTUNED_CACHE=str(tmp_path / "cache"))
    shutil.rmtree(tmp_path / "bin")
    second = home.run(code, PATH=path, GEMMTUNED_CACHE=str(tmp_path / "cache"))

    for done in (first, second):
        assert done.said[0] == "fallback"
        assert done.said[1].endswith("x.cpp:1: error: no such thing")
        assert done.err == ""
    assert home.calls() == 2
