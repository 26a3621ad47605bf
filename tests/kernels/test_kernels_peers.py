"""Other libraries' kernels as candidates, each by stand-ins with its documented schema (support/peers_site.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import peers_site
import pytest
import torch
from hooked import Home

from gemmtuned.configs.engine_races import Peer, text_of
from gemmtuned.configs.passing import lack_in
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, cpu_device
from gemmtuned.daemon.child.trials import Trials
from gemmtuned.daemon.child.verify import verify
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import MAY_COMPILE, Trial
from gemmtuned.db import queries
from gemmtuned.kernels.backends import BACKENDS, candidates
from gemmtuned.kernels.backends.torch_op import OperatorBackend
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.other_packages import GUESTS

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
PEERS = {  # backend -> (its distribution, problems that it runs, problems that it must not be given)
    "vllm_cutlass": (
        "vllm",
        ("scaled:fp8_e4m3>bf16:{m}x64x256+bias,scale=row,math=reduced", "scaled:i8>bf16:{m}x64x256,scale=row"),
        ("scaled:fp8_e4m3>bf16:8x64x256,scale=row", "scaled:i8>fp32:8x64x256,scale=row", "bf16:8x64x256"),
    ),
    "vllm_cutlass_blocks": (
        "vllm",
        (
            "scaled:fp8_e4m3>bf16:{m}x256x256,scale=1x128,wscale=128x128,scalelayout=col",
            "scaled:fp8_e4m3>bf16:{m}x192x256,scale=1x128,wscale=128x128,scalelayout=col",  # half a block of W's rows
        ),
        ("scaled:fp8_e4m3>bf16:6x256x384,scale=1x128,wscale=128x128,scalelayout=col",),
    ),
    "vllm_cutlass_zero": (
        "vllm",
        ("scaled:i8>bf16:{m}x64x256+bias,scale=row+zero,wscale=row",),
        ("scaled:i8>bf16:8x64x256,scale=row", "scaled:i8>bf16:8x64x256,scale=tensor+zero,wscale=row"),
    ),
    "vllm_cutlass_zero_tensor": (
        "vllm",
        ("scaled:i8>bf16:{m}x64x256,scale=tensor+zero,wscale=row",),
        ("scaled:i8>bf16:8x64x256,scale=row+zero,wscale=row", "scaled:i8>bf16:8x64x264,scale=tensor+zero,wscale=row"),
    ),
    "vllm_deep_gemm": (
        "vllm",
        ("scaled:fp8_e4m3>bf16:{m}x192x256,scale=1x128,wscale=128x128,scalelayout=col",),
        (
            "scaled:fp8_e4m3>fp16:8x320x384,scale=1x128,wscale=128x128,scalelayout=col",
            "scaled:fp8_e4m3>bf16:8x320x384,scale=1x128,wscale=128x128",  # torch would run it in its place
        ),
    ),
    "vllm_triton_blocks": (
        "vllm",
        (
            "scaled:fp8_e4m3>bf16:{m}x192x256,scale=1x128,wscale=128x128",
            "scaled:fp8_e4m3>fp16:{m}x48x208,scale=1x128,wscale=128x128,scalelayout=col",
        ),
        ("scaled:fp8_e4m3>bf16:8x320x384+bias,scale=1x128,wscale=128x128", "scaled:fp8_e4m3>bf16:8x64x256,scale=row"),
    ),
    "sglang_fp8": (
        "sglang-kernel",
        ("scaled:fp8_e4m3>bf16:{m}x64x256+bias,scale=row,math=reduced",),
        ("scaled:fp8_e4m3>bf16:8x64x256,scale=row", "scaled:fp8_e4m3>bf16:8x64x256,scale=tensor,math=reduced"),
    ),
    "sglang_int8": (
        "sglang-kernel",
        ("scaled:i8>fp16:{m}x64x256+bias,scale=row",),
        ("scaled:i8>fp16:8x8x256,scale=row",),
    ),
    "sglang_blocks": (
        "sglang-kernel",
        ("scaled:fp8_e4m3>bf16:{m}x256x256,scale=1x128,wscale=128x128,scalelayout=col",),
        ("scaled:fp8_e4m3>bf16:8x192x384,scale=1x128,wscale=128x128,scalelayout=col",),
    ),
    "deep_gemm_sglang": (
        "sgl-deep-gemm",
        ("scaled:fp8_e4m3>bf16:{m}x192x256,scale=1x128,wscale=128x128,scalelayout=col",),
        ("scaled:fp8_e4m3>bf16:8x320x320,scale=1x128,wscale=128x128,scalelayout=col",),
    ),
    "deep_gemm": (
        "deep-gemm",
        ("scaled:fp8_e4m3>bf16:{m}x192x256,scale=1x128,wscale=128x128,scalelayout=col",),
        ("scaled:fp8_e4m3>bf16:8x320x320,scale=1x128,wscale=128x128,scalelayout=col",),
    ),
    "flashinfer_blocks": (
        "flashinfer-python",
        ("scaled:fp8_e4m3>bf16:{m}x192x256,scale=1x128,wscale=128x128,scalelayout=col",),
        ("scaled:fp8_e4m3>bf16:6x320x384,scale=1x128,wscale=128x128,scalelayout=col",),
    ),
    "flashinfer_tensors": (
        "flashinfer-python",
        ("scaled:fp8_e4m3>bf16:{m}x16x96,scale=tensor,math=reduced",),  # torch is slow at it on CPUs
        ("scaled:fp8_e4m3>bf16:8x64x256,scale=tensor", "scaled:fp8_e4m3>bf16:8x64x256+bias,scale=tensor,math=reduced"),
    ),
}  # fmt: skip
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
ON_THIS_CPU = """
    import json, sys, torch
    from dataclasses import replace
    sys.path.insert(0, {site!r})
    from gemmtuned.configs.launch import read_launch
    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.solution import cpu_device
    from gemmtuned.daemon.child.verify import verify
    from gemmtuned.kernels.backends import BACKENDS
    from gemmtuned.kernels.families import family_of
    from gemmtuned.kernels.scaled_by_torch import block_product_of_values

    torch.set_num_threads(1)
    peer = replace(BACKENDS[{name!r}], kinds=("cpu",))  # the stand-ins run here
    for module in peer.imports:
        __import__(module)
        ours = sys.modules[module]
        if module.startswith("gemmtuned."):  # its operators are registered for GPUs
            for each in [f for f in vars(ours).values() if getattr(f, "__module__", "") == module]:
                if each.__name__ not in ("is_ready", "apply"):
                    ours.LIBRARY.impl(each.__name__, each, "CPU")
    scaled_mm = torch._scaled_mm
    def blocks(x, w, of_x, of_w, *, bias, out_dtype, use_fast_accum):  # torch has none on CPUs
        return block_product_of_values(x, w.mT, of_x, of_w.mT, out_dtype)
"""
GATE = """
    said = [peer.stamps(cpu_device())]
    for text in {problems!r}:
        problem = Problem.parse(text + ",threads=1")
        [found] = peer.candidates(problem)
        kernel = peer.prepare(found, problem)
        torch._scaled_mm = blocks if problem.scale == "1x128" else scaled_mm
        stock = family_of(problem).default(problem)
        verdict = verify(problem, {{found: kernel}}, stock, device=torch.device("cpu"))[found]
        record = read_launch(peer.launch_of(found, problem)[0])
        record.check_for(problem)
        said.append([verdict.outcome, verdict.note, record.package, record.version])
    for text in {others!r}:
        said.append(list(peer.candidates(Problem.parse(text))) != [])
    print(json.dumps(said))
"""


@pytest.mark.parametrize("name", PEERS)
def test_where_it_is_not_installed_there_is_no_candidate(name: str) -> None:
    assert BACKENDS[name].stamps(H200) == {}


@pytest.mark.parametrize(
    ("name", "many"),
    [
        pytest.param(name, m, marks=() if m == (8, 32)[at % 2] else pytest.mark.long)
        for at, name in enumerate(PEERS)
        for m in (8, 32)
    ],
)
def test_its_operator_passes_the_gate_and_is_given_nothing_else(
    name: str, many: int, home: Home, tmp_path: Path
) -> None:
    """many: rows of X."""
    package, problems, others = PEERS[name]
    peers_site.install(tmp_path / "site", package)
    texts = [text.format(m=many) for text in problems]
    code = ON_THIS_CPU + GATE

    done = home.run(code.format(site=str(tmp_path / "site"), name=name, problems=texts, others=list(others)))

    assert done.code == 0, done.err
    stamps, *rest = done.said
    assert stamps == {name: "1.2.3"}
    assert rest == [["ok", "", package, "1.2.3"]] * len(texts) + [False] * len(others)


def test_an_argument_that_nothing_is_known_of_makes_no_candidate(home: Home, tmp_path: Path) -> None:
    """DeepGEMM's schema differs from fork to fork."""
    peers_site.install(tmp_path / "site", "sgl-deep-gemm")
    module = tmp_path / "site/deep_gemm/__init__.py"
    module.write_text(module.read_text().replace("Tensor(a!) d, Tensor?", "Tensor(a!) d, Tensor ranks, Tensor?"))
    code = """
    from gemmtuned.configs.errors import CandidateFailed
    problem = Problem.parse("scaled:fp8_e4m3>bf16:8x320x384,scale=1x128,wscale=128x128,scalelayout=col,threads=1")
    [found] = peer.candidates(problem)
    try:
        print(json.dumps(str(peer.prepare(found, problem))))
    except CandidateFailed as err:
        print(json.dumps(str(err)))
    """

    done = home.run(ON_THIS_CPU.format(site=str(tmp_path / "site"), name="deep_gemm_sglang") + code)

    assert done.said.startswith("backend deep_gemm_sglang: nothing is known for argument ranks of deep_gemm::"), done


BY_NAME = partial(
    OperatorBackend, name="by_name", package="torch", operator="by_name_alone::product", suits=lambda _: True,
    kinds=("cpu",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({"x": "x", "w": "w"}, 1),
        ({"x": "x", "w": "w", "times": 3}, 3),
        ({"x": "x", "w": "w", "times?": 2, "epilogue?": 0}, 2),  # of names that other versions have
    ],
)
def test_arguments_that_have_names_alone_are_given_by_name(given: dict[str, Any], times: int) -> None:
    library = torch.library.Library("by_name_alone", "DEF")
    library.define("product(Tensor x, Tensor w, *, int times=1) -> Tensor")
    library.impl("product", lambda x, w, times=1: x @ w.t() * times, "CPU")
    problem, x, w = Problem.parse("fp32:8x16x24,threads=1"), torch.randn(8, 24), torch.randn(16, 24)
    for arguments in (given, ("x", "w", times)):
        kernel = BY_NAME(arguments=arguments).prepare(Candidate("by_name"), problem)
        assert torch.equal(kernel.call(x, w.t(), None), x @ w.t() * times)


class OfTheirs(Exception):
    """Packages have errors of their own."""


@pytest.mark.parametrize("error", [
    CalledProcessError(1, "nvcc"), FileNotFoundError("nvcc"), ImportError("ninja"), SystemExit(1), OfTheirs("no"),
])  # fmt: skip
def test_an_operator_that_cannot_compile_is_refused_and_the_search_goes_on(error: BaseException) -> None:
    """Seen of libraries that compile at their first call, where no compiler is installed."""
    library, name = torch.library.Library("cannot_compile", "FRAGMENT"), type(error).__name__
    library.define(f"{name}(Tensor x, Tensor w) -> Tensor")

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        raise error

    library.impl(name, product, "CPU")
    backend = OperatorBackend(
        name="theirs", package="torch", operator=f"cannot_compile::{name}", suits=lambda _: True, arguments=("x", "w"),
        kinds=("cpu",),
    )  # fmt: skip
    problem, found = Problem.parse("fp32:8x16x24,threads=1"), Candidate("theirs")
    kernel, stock = backend.prepare(found, problem), family_of(problem).default(problem)

    verdict = verify(problem, {found: kernel}, stock, device=torch.device("cpu"))[found]

    assert verdict.outcome == "refused" and name in verdict.note


def test_libraries_that_compile_at_their_first_call_are_given_the_time_for_it() -> None:
    starts: list[Trial] = []
    for name in (*PEERS, "torch", "cublaslt"):
        Trials(Problem(m=8, n=8, k=8), starts.append).start(Candidate(name))

    slow = {start.candidate.backend for start in starts if start.note == MAY_COMPILE}
    assert slow == {name for name in PEERS if "deep_gemm" in name or "flashinfer" in name or "triton" in name}


def test_a_backend_that_raises_when_it_is_asked_for_candidates_costs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def suits(problem: Problem) -> bool:
        raise KeyError(problem.family)

    said: list[str] = []
    broken = replace(BY_NAME(arguments=("x", "w")), suits=suits)
    monkeypatch.setitem(BACKENDS, broken.name, broken)
    monkeypatch.setitem(GUESTS.package_of, broken.name, "theirs")
    monkeypatch.setattr(GUESTS, "say", lambda name, why, wanted: said.append(f"{name}: {why}"))
    here = Environment(cpu_device(), {"torch": "1", "torch_swap": "1", broken.name: "1"})

    found = {candidate.backend for candidate in candidates(Problem.parse("fp32:8x16x24,threads=1"), here)}

    assert found == {"torch", "torch_swap"} and said == ["by_name: KeyError: 'dense'"]


def test_a_package_that_would_end_the_worker_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_all.py").write_text("raise SystemExit('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    assert BY_NAME(arguments=("x", "w"), imports=("ends_all",)).stamps(cpu_device()) == {}


def test_a_package_whose_import_meets_a_full_disk_is_no_candidate_that_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fills_disk.py").write_text("with open('/dev/full', 'w') as cache: cache.write('x')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(GUESTS, "lacking", {})
    backend = BY_NAME(arguments=("x", "w"), imports=("fills_disk",), suits=lambda problem: problem.dtype == "fp32")
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    told: list[Trial] = []
    assert backend.stamps(cpu_device()) == {}
    for problem in ("fp32:8x16x24,threads=1", "bf16:8x16x24,threads=1"):
        Trials(Problem.parse(problem), told.append).lacking()
    for asked in (SearchOptions(backends=("torch",)), SearchOptions(only=(Candidate("torch"),))):
        Trials(Problem.parse("fp32:8x16x24,threads=1"), told.append).lacking(asked.asks_for)
    (trial,) = told
    assert SearchOptions(only=(trial.candidate,)).asks_for(backend.name)
    assert trial.candidate == Candidate(backend.name) and lack_in(trial.note) == "disk"
    monkeypatch.setitem(BACKENDS, backend.name, replace(backend, suits=lambda problem: 1 / 0 > 1))
    Trials(Problem.parse(problem), told.append).lacking()  # what is broken costs its own part


CRASHED = "import of vllm._custom_ops"
LINEARS = "vllm.model_executor.kernels.linear.scaled_mm"
MODULES = {f"{LINEARS}.deep_gemm": {"vllm_deep_gemm"}, f"{LINEARS}.triton": {"vllm_triton_blocks"}}


@pytest.mark.parametrize(
    ("without", "ended", "imported"),
    [
        ((), {}, {"vllm._custom_ops", *MODULES}),
        ((), {CRASHED: "ended a worker: killed by SIGSEGV"}, {*MODULES}),
        (("vllm_deep_gemm",), {}, {"vllm._custom_ops", f"{LINEARS}.triton"}),
        (("vllm",), {}, set()),
    ],
)
def test_what_is_left_out_of_a_package_is_not_imported_and_the_rest_is(
    without: tuple[str, ...], ended: dict[str, str], imported: set[str], home: Home, tmp_path: Path
) -> None:
    peers_site.install(tmp_path / "site", "vllm")
    code = f"""
    import json, sys
    sys.path.insert(0, {str(tmp_path / "site")!r})
    from gemmtuned.configs.solution import Device
    from gemmtuned.kernels import backends
    from gemmtuned.kernels.other_packages import GUESTS

    said, ran = {{}}, []
    GUESTS.without, GUESTS.ended = {without!r}, {ended!r}
    GUESTS.say = lambda name, why, wanted: said.update({{name: wanted}})
    GUESTS.tell = lambda piece, package: ran.append(piece)
    here = backends.environment(Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132))
    GUESTS.say_unused()
    vllm = [name for name in here.backends if name.startswith("vllm")]
    print(json.dumps([sorted(vllm), said, sorted({{piece for piece in ran if piece.startswith("import")}})]))
    """

    done = home.run(code)

    assert done.code == 0, done.err
    there, said, ran = done.said
    names = {name for name, (package, *_) in PEERS.items() if package == "vllm"}
    of_modules = {**MODULES, "vllm._custom_ops": names - set().union(*MODULES.values())}
    expected = {name for module in imported for name in of_modules[module]}
    assert set(there) == expected
    assert said == dict.fromkeys(names - expected, bool(without))
    assert {piece.removeprefix("import of ") for piece in ran} == imported


SERVED = """
    import gemmtuned, json, time
    from pathlib import Path
    from hooked import publish, published, wait_for
    from gemmtuned.hooks import activate
    import vllm._custom_ops as vllm

    problem = Problem.parse("scaled:fp8_e4m3>bf16:6x64x256+bias,scale=row,math=reduced,threads=1")
    [found] = peer.candidates(problem)
    launch, _ = peer.launch_of(found, problem)
    row = published(problem, peer.name, stamp="1.2.3", launch=launch)
    publish(activate.current().settings.config_dir, [row], 1)
    wait_for(lambda: gemmtuned.generation() == 1 and gemmtuned.status()["engine_operators"])

    fp8 = torch.float8_e4m3fn
    x, w, bias = torch.randn(6, 256).to(fp8), torch.randn(64, 256).to(fp8), torch.randn(64).bfloat16()
    sx, sw = torch.rand(6, 1), torch.rand(1, 64)
    right = vllm.product(x, w.t(), sx, sw) + bias.double()
    own = torch.empty(6, 64, dtype=torch.bfloat16)
    torch.ops._C.cutlass_scaled_mm(own, x, w.t(), sx, sw, bias)
    print(json.dumps([torch.equal(own, right.bfloat16()), len(vllm.calls)]))
"""


@pytest.mark.skipif(TORCH < (2, 10), reason="torch 2.9 has no way to the kernel beneath")
def test_a_program_that_calls_it_itself_is_served_by_it_once(home: Home, tmp_path: Path) -> None:
    """The hook stands before vLLM's operator, too: it must not come back to itself, nor count twice."""
    peers_site.install(tmp_path / "site", "vllm")

    done = home.run(ON_THIS_CPU.format(site=str(tmp_path / "site"), name="vllm_cutlass") + SERVED)

    assert done.said == [True, 1], done
    row = "scaled:fp8_e4m3>bf16:6x64x256+bias,scale=row,math=reduced,threads=1"
    counts = {key: calls for key, calls in home.counts().items() if key[0].startswith("scaled")}
    assert counts == {(row, "exact"): 1}


ANOTHER = """
    import gemmtuned, json, time
    from importlib.metadata import version
    from pathlib import Path
    from hooked import publish, published, wait_for
    from gemmtuned.configs.launch import OperatorLaunch
    from gemmtuned.hooks import activate
    import vllm._custom_ops as vllm

    mine = torch.library.Library("another", "DEF")
    mine.define("product(Tensor x, Tensor b, Tensor sx, Tensor sb, Tensor? bias) -> Tensor")
    ran = []

    def product(x, b, sx, sb, bias):
        ran.append(1)
        return (vllm.product(x, b, sx, sb) + bias.double()).bfloat16()

    mine.impl("product", product, "CPU")
    problem = Problem.parse("scaled:fp8_e4m3>bf16:6x64x256+bias,scale=row,math=reduced,threads=1")
    record = OperatorLaunch(
        operator="another::product", schema=str(torch.ops.another.product.default._schema), package="torch",
        arguments=("x", "b", "scale_x", "scale_b", "bias"), version=version("torch"),
    )
    fp8 = torch.float8_e4m3fn
    x, w, bias = torch.randn(6, 256).to(fp8), torch.randn(64, 256).to(fp8), torch.randn(64).bfloat16()
    sx, sw = torch.rand(6, 1), torch.rand(1, 64)
    right = (vllm.product(x, w.t(), sx, sw) + bias.double()).bfloat16()
    own = torch.empty(6, 64, dtype=torch.bfloat16)
    said = []
    for generation, beside in enumerate({besides!r}, 1):
        row = published(problem, "another", stamp=version("torch"), launch=record.text(), beside=beside)
        publish(activate.current().settings.config_dir, [row], generation)
        wait_for(lambda: gemmtuned.generation() == generation and gemmtuned.status()["engine_operators"])
        torch.ops._C.cutlass_scaled_mm(own.zero_(), x, w.t(), sx, sw, bias)
        said.append([torch.equal(own, right), len(vllm.calls), len(ran)])
    from gemmtuned.configs.solution import Environment, cpu_device
    from gemmtuned.db.store import Store
    settings = activate.current().settings
    store = Store(settings.db, locks=settings.locks)
    stamps = {"torch": torch.__version__, "another": version("torch")}
    store.solutions.install(None, [row], environment=Environment(cpu_device(), stamps), now_s=time.time())
    torch.ops._C.cutlass_scaled_mm(own, x, w.t(), sx, sw, bias)
    publish(settings.config_dir, [row], generation + 1)  # what waits is told again with each table
    wait_for(lambda: gemmtuned.generation() == generation + 1)
    torch.ops._C.cutlass_scaled_mm(own, x, w.t(), sx, sw, bias)
    print(json.dumps(said))
"""


@pytest.mark.skipif(TORCH < (2, 10), reason="torch 2.9 has no way to the kernel beneath")
def test_a_program_that_calls_it_is_served_by_another_once_that_has_won_over_it(home: Home, tmp_path: Path) -> None:
    """Not raced; raced beside an older version of it, and won; raced, and as fast; raced with a newer one."""
    peers_site.install(tmp_path / "site", "vllm")
    raced = (Peer("1.2.2", 1.5), Peer("1.2.3", 1.01), Peer("1.3", 1.5))
    besides = ["", *(text_of({"vllm_cutlass": peer}) for peer in raced)]

    code = ON_THIS_CPU.format(site=str(tmp_path / "site"), name="vllm_cutlass") + ANOTHER.replace(
        "{besides!r}", repr(besides)
    )
    done = home.run(code)

    assert done.said == [[True, 1, 0], [True, 1, 1], [True, 2, 1], [True, 3, 1]], done
    row = "scaled:fp8_e4m3>bf16:6x64x256+bias,scale=row,math=reduced,threads=1"
    counts = {key: calls for key, calls in home.counts().items() if key[0].startswith("scaled")}
    assert counts == {(row, "exact"): 2, (row, "miss"): 4}
    [waits] = queries.unraced(home.path / "tune.db")
    assert (waits["problem"], waits["operators"], waits["backend"]) == (row, "_C::cutlass_scaled_mm", "another")
    assert waits["beside"] == besides[-1]


@pytest.mark.parametrize(("name", "package", "module"), [
    ("flashinfer", "flashinfer-python", "flashinfer.gemm"), ("deep_gemm", "deep-gemm", "deep_gemm"),
])  # fmt: skip
def test_a_program_has_the_operators_of_functions_once_it_asks_for_them(
    name: str, package: str, module: str, home: Home, tmp_path: Path
) -> None:
    peers_site.install(tmp_path / "site", package)
    code = f"""
    import json, sys, time, torch
    sys.path.insert(0, {str(tmp_path / "site")!r})
    import gemmtuned
    from hooked import wait_for
    from gemmtuned.configs.errors import GemmtunedError
    space = getattr(torch.ops, "gemmtuned_{name}")
    before = hasattr(space, "fp8_gemm_nt") or hasattr(space, "bmm_fp8")
    import {module}
    wait_for(lambda: hasattr(space, "fp8_gemm_nt") or hasattr(space, "bmm_fp8"))
    gemmtuned.patch({name!r})()
    print(json.dumps([before, {f"gemmtuned.kernels.from_{name}"!r} in sys.modules]))
    """

    assert home.run(code, GEMMTUNED_PATCH=name).said == [False, True]
