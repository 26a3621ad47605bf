"""The native hook on a real GPU: routed calls are right, odd operands and broken kernels end at torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import torch
from gpu_needs import NVIDIA, SM_90, TWO
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture

import gemmtuned
from gemmtuned.configs.manifest import BINARIES, write_binary
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Solution
from gemmtuned.kernels import cublaslt
from gemmtuned.kernels.backends import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    NVIDIA,
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Operands = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]
MATH = {"bf16": "reduced", "fp16": "reduced", "fp32": "ieee"}


def operands(problem: Problem) -> Operands:
    """X [M, K], the [K, N] operand, bias, as the problem's layout says."""
    dtype = DTYPES[problem.dtype]

    def matrix(rows: int, columns: int, letter: str) -> torch.Tensor:
        if letter == "n":
            return torch.randn(rows, columns, device="cuda", dtype=dtype)
        return torch.randn(columns, rows, device="cuda", dtype=dtype).t()

    a, b = matrix(problem.m, problem.k, problem.layout[0]), matrix(problem.k, problem.n, problem.layout[1])
    return a, b, torch.randn(problem.n, device="cuda", dtype=dtype) if problem.bias else None


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def error(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> float:
    want = a.double() @ b.double()
    if bias is not None:
        want = want + bias.double()
    return float((y.double() - want).norm() / want.norm())


def assert_routed(
    program: Program, problem: Problem, candidate: Candidate, abc: Operands, stock: torch.Tensor, allowed: float
) -> None:
    """Once it is published a call goes through it, and the result is laid out as torch's own and as right."""
    program.publish(program.solution(problem, candidate))
    program.outcomes()
    routed = product(*abc)
    assert program.outcomes() == {"exact": 1}, candidate
    assert routed.stride() == stock.stride() and error(routed, *abc) <= allowed, candidate


def assert_right_in_a_graph(abc: Operands, allowed: float, *, replays: int = 1) -> None:
    """With the values that X has when the graph is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = product(*abc)
    abc[0].copy_(torch.randn_like(abc[0]))
    for _ in range(replays):
        graph.replay()
    assert error(inside, *abc) <= allowed


def gemv(n: int = 256, k: int = 1024) -> tuple[Problem, Candidate]:
    problem = Problem(m=1, n=n, k=k, math_mode="reduced")
    return problem, next(BACKENDS["triton"].candidates(problem))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("bias", [False, True])
def test_cublaslt_algorithms_are_right_in_python_in_the_hook_and_in_a_graph(
    program: Program, dtype: str, layout: str, bias: bool
) -> None:
    for m, n, k in ((24, 320, 512), (136, 1024, 2048)):
        problem = Problem(m=m, n=n, k=k, bias=bias, dtype=dtype, layout=layout, math_mode=MATH[dtype])
        a, b, c = operands(problem)
        stock = product(a, b, c)
        allowed = 1.5 * error(stock, a, b, c) + 1e-7
        found = list(BACKENDS["cublaslt"].candidates(problem))
        assert len(found) >= 2 and len({x.config for x in found}) == len(found)
        for candidate in found[:4]:
            y = BACKENDS["cublaslt"].prepare(candidate, problem).bind(b)(a, c)
            assert error(y, a, b, c) <= allowed, candidate
            assert_routed(program, problem, candidate, (a, b, c), stock, allowed)
        assert_right_in_a_graph((a, b, c), allowed)
    assert not program.hook.native.failures()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kernel", "m", "n", "k"),
    [
        ("gemv", 1, 576, 7168), ("gemv", 1, 1001, 1032), ("fragments", 2, 576, 7168),
        ("fragments", 3, 1001, 1032), ("fragments", 4, 256, 7168), ("fragments", 2, 2112, 1544),
        ("fragments", 16, 512, 2048), ("selected", 16, 576, 7168), ("selected", 9, 1001, 1032),
        ("warp_split_k", 3, 1001, 1030), ("warp_split_k", 8, 256, 7170), ("warp_split_k", 20, 1001, 1032),
        ("tiles", 16, 512, 16384), ("tiles", 64, 1001, 1032), ("tiles", 200, 576, 512),
    ],
)  # fmt: skip
def test_kernels_of_ours_are_right_in_the_hook_and_in_a_graph(
    program: Program, kernel: str, m: int, n: int, k: int, dtype: str
) -> None:
    problem = Problem(m=m, n=n, k=k, bias=n % 2 == 1, dtype=dtype, math_mode="reduced")
    a, b, c = operands(problem)
    stock = product(a, b, c)
    allowed = 1.5 * error(stock, a, b, c) + 1e-7
    kinds: dict[tuple[int, int, bool], Candidate] = {}
    for candidate in BACKENDS["triton"].candidates(problem):
        config = json.loads(candidate.config)
        if config["kernel"] == kernel:
            kinds.setdefault((config.get("mma", 0), config.get("cluster", 0), config["split"] > 1), candidate)
    assert kinds
    for candidate in kinds.values():
        assert_routed(program, problem, candidate, (a, b, c), stock, allowed)
    assert_right_in_a_graph((a, b, c), allowed, replays=3)
    assert not program.hook.native.failures()


def widened(x: torch.Tensor, apart: int) -> torch.Tensor:
    """The same values in rows that are this many further apart."""
    wide = torch.empty(x.shape[0], x.shape[1] + apart, device=x.device, dtype=x.dtype)[:, : x.shape[1]]
    return wide.copy_(x)


@SM_90
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "parts", "tokens", "bias"),
    [
        (64, 576, 7168, 40, 7, 64, False), (64, 576, 7168, 40, 8, 64, True), (64, 256, 7168, 40, 16, 64, False),
        (64, 2112, 7168, 56, 3, 64, True), (64, 512, 16384, 88, 15, 64, False), (64, 7168, 2048, 56, 1, 64, True),
        (33, 1002, 4096, 8, 1, 48, True), (20, 1280, 8192, 80, 6, 32, False), (1, 130, 4032, 16, 9, 16, True),
        (64, 28672, 4096, 224, 1, 64, False), (49, 8, 64, 8, 1, 64, True), (64, 1536, 7168, 96, 6, 64, False),
        (64, 576, 7168, 40, 9, 64, True), (64, 5120, 25600, 256, 1, 64, False), (64, 2048, 8192, 240, 8, 64, True),
        (16, 5120, 2880, 80, 2, 16, True), (9, 1536, 7168, 104, 7, 16, False),
        (256, 576, 7168, 88, 8, 128, True), (256, 256, 7168, 88, 8, 64, False), (256, 8192, 1024, 128, 1, 128, False),
        (130, 1280, 8192, 56, 2, 80, True), (65, 1002, 4096, 80, 9, 80, False), (100, 130, 4032, 16, 3, 112, True),
        (256, 5120, 25600, 160, 2, 128, False), (200, 64, 640, 64, 1, 128, True),
    ],
)  # fmt: skip
def test_one_shot_is_right_in_the_hook_and_in_a_graph_and_the_same_every_time(
    program: Program, m: int, n: int, k: int, rows: int, parts: int, tokens: int, bias: bool, dtype: str
) -> None:
    problem = Problem(m=m, n=n, k=k, bias=bias, dtype=dtype, math_mode="reduced")
    a, b, c = operands(problem)
    stock = product(a, b, c)
    allowed = 1.5 * error(stock, a, b, c) + 1e-7
    candidate = Candidate.of("cuda", kernel="one_shot", rows=rows, parts=parts, tokens=tokens)
    in_python = BACKENDS["cuda"].prepare(candidate, problem).bind(b)(a, c)
    assert not in_python.isnan().any()
    assert error(in_python, a, b, c) <= allowed
    assert_routed(program, problem, candidate, (a, b, c), stock, allowed)
    for _ in range(30):
        assert torch.equal(product(a, b, c), in_python)
    assert_right_in_a_graph((a, b, c), allowed, replays=3)
    run = BACKENDS["cuda"].prepare(candidate, problem).bind(w := widened(b.t(), 8).t())
    for fewer, apart in (
        (m, 8),
        (max(m - 1, 1), 8),
        (m // 3 + 1, 1 << 24),
    ):  # rows past X's last one are in no memory of ours
        x = widened(a[:fewer], apart)
        assert error(run(x, c), x, w, c) <= 1.5 * error(product(x, w, c), x, w, c) + 1e-7
    assert not program.hook.native.failures()


def test_cublaslt_serves_slices_of_wider_matrices_and_leaves_the_rest_to_torch(program: Program) -> None:
    problem = Problem(m=24, n=320, k=512, math_mode="reduced")
    program.publish(program.solution(problem, next(BACKENDS["cublaslt"].candidates(problem))))
    wide = torch.randn(24, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(320, 512, device="cuda", dtype=torch.bfloat16)
    program.outcomes()

    for x, outcome in ((wide[:, 512:], "exact"), (wide[:, 1:513], "miss")):
        assert error(x @ w.t(), x, w.t(), None) < 5e-3
        assert program.outcomes() == {outcome: 1}


def test_replays_of_a_graph_count_for_all_its_launches(program: Program) -> None:
    problem, candidate = gemv()
    program.publish(program.solution(problem, candidate))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 256))
    y = torch.randn(8, 64, device="cuda")
    torch.nn.functional.linear(x, w), y @ y.t()
    graph = torch.cuda.CUDAGraph()
    program.outcomes()
    with torch.cuda.graph(graph):
        for _ in range(3):
            torch.nn.functional.linear(x, w)
        y @ y.t()

    assert program.outcomes() == {"exact": 3, "miss": 1}  # the capture itself
    for _ in range(5):
        graph.replay()
    assert program.outcomes() == {"exact": 15, "miss": 5}
    gemmtuned.graph_replayed(graph, 2)
    assert program.outcomes() == {"exact": 6, "miss": 2}
    graph.replay()
    del graph
    assert program.outcomes() == {"exact": 3, "miss": 1}  # what was replayed before it went
    assert program.outcomes() == {}


def test_a_thread_whose_first_use_of_the_gpu_is_a_routed_call(program: Program) -> None:
    problem, candidate = gemv()
    program.publish(program.solution(problem, candidate))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 256))
    program.outcomes()
    found = []

    def work() -> None:
        with torch.inference_mode():
            found.append(torch.nn.functional.linear(x, w))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert program.outcomes() == {"exact": 1} and not program.hook.native.failures()
    assert error(found[0], x, w.t(), None) < 5e-3


@pytest.mark.parametrize("what", ["x beside its alignment", "w with odd rows", "x on a strided row"])
def test_operands_the_binary_was_not_compiled_for_go_to_torch_without_blame(program: Program, what: str) -> None:
    problem, candidate = gemv()
    program.publish(program.solution(problem, candidate))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 256))
    if what.startswith("x beside"):
        x = torch.randn(1025, device="cuda", dtype=torch.bfloat16)[1:][None]
    elif what.startswith("w"):
        w = torch.randn(256, 1025, device="cuda", dtype=torch.bfloat16)[:, :1024]
    else:
        x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)[:, ::2]
    program.outcomes()

    assert error(torch.nn.functional.linear(x, w), x, w.t(), None) < 5e-3
    assert program.outcomes() == {"miss": 1} and not program.hook.native.failures()


@pytest.mark.parametrize("backend", ["triton", "cublaslt"])
def test_an_operand_on_another_device_gives_torchs_error_and_the_device_lives_on(
    program: Program, backend: str
) -> None:
    problem = Problem(m=1, n=256, k=1024, bias=True, math_mode="reduced")
    program.publish(program.solution(problem, next(BACKENDS[backend].candidates(problem))))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 256))
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    for operands in ((x, w.cpu(), bias), (x, w, bias.cpu())):
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.linear(*operands)
    with pytest.raises(RuntimeError):
        torch.addmm(bias, x, w.t(), out=torch.empty(1, 256, dtype=torch.bfloat16))
    program.outcomes()
    assert error(torch.nn.functional.linear(x, w, bias), x, w.t(), bias) < 5e-3
    assert program.outcomes() == {"exact": 1} and not program.hook.native.failures()


def test_a_batch_of_one_takes_the_dense_solution(program: Program) -> None:
    problem, candidate = gemv()
    program.publish(program.solution(problem, candidate))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 256))
    program.outcomes()

    y = torch.bmm(x[None], w.t()[None])
    assert y.shape == (1, 1, 256) and error(y[0], x, w.t(), None) < 5e-3
    assert program.outcomes() == {"exact": 1}


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_cublas_allow_bf16_reduced_precision_reduction"), reason="this torch has no such switch"
)
def test_where_cuts_of_k_are_forbidden_torch_serves(program: Program) -> None:
    problem, candidate = gemv()
    ieee = replace(problem, math_mode="ieee")
    program.publish(program.solution(problem, candidate), program.solution(ieee, candidate))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 256))
    program.outcomes()
    matmul: Any = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the other one refuses allow_splitk=False
    try:
        _with_each_switch(program, matmul, x, w)
    finally:
        torch.backends.cuda.preferred_blas_library(library)


def _with_each_switch(program: Program, matmul: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    for value, outcome in ((True, "exact"), (False, "exact"), ((False, False), "miss")):
        try:
            matmul.allow_bf16_reduced_precision_reduction = value
        except (TypeError, RuntimeError):  # an older torch knows on and off alone
            continue
        try:
            torch.nn.functional.linear(x, w)
            assert program.outcomes() == {outcome: 1}, value
        finally:
            matmul.allow_bf16_reduced_precision_reduction = True


def corrupt_file(program: Program, solution: Solution) -> Solution:
    path = program.folder / BINARIES / json.loads(solution.launch)["binary"]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    return solution


def garbage_file(program: Program, solution: Solution) -> Solution:
    data = b"\x7fELF" + bytes(4096)
    write_binary(program.folder, data)
    return with_launch(solution, binary=sha256(data).hexdigest())


def with_launch(solution: Solution, **changes: Any) -> Solution:
    return replace(solution, launch=json.dumps(json.loads(solution.launch) | changes))


@pytest.mark.parametrize(
    "spoil",
    [corrupt_file, garbage_file, lambda p, s: with_launch(s, name="no_such_kernel"),
     lambda p, s: with_launch(s, binary="0" * 64)],
    ids=["wrong hash", "no cubin", "wrong symbol", "no file"],
)  # fmt: skip
def test_a_binary_that_cannot_be_used_costs_its_row_alone(
    program: Program, spoil: Callable[[Program, Solution], Solution]
) -> None:
    problem, candidate = gemv(n=384)
    good, other = gemv()
    solution = spoil(program, program.solution(problem, candidate))
    program.publish(solution, program.solution(good, other))
    x = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)
    program.outcomes()

    for n, outcome in ((384, "miss"), (256, "exact")):
        w = torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16)
        assert error(torch.nn.functional.linear(x, w), x, w.t(), None) < 5e-3
        assert program.outcomes() == {outcome: 1}
    assert gemmtuned.status()["refused"] == {"its kernel does not load": 2}  # in both modes
    for path in (program.folder / BINARIES).iterdir():
        path.unlink()


def test_a_launch_that_fails_is_served_by_torch_and_switched_off(program: Program) -> None:
    problem, candidate = gemv(n=448)
    solution = program.solution(problem, candidate)
    program.publish(with_launch(replace(solution, config=solution.config + " "), threads=1024))
    x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, 448))
    program.outcomes()

    for _ in range(2):
        assert error(torch.nn.functional.linear(x, w), x, w.t(), None) < 5e-3
    assert program.outcomes() == {"miss": 2}
    [(_, how, reason)] = program.hook.native.failures()
    assert how == "failed"
    assert "cuLaunchKernel" in reason
    torch.cuda.synchronize()


def reducing(program: Program) -> tuple[Problem, Solution]:
    """A problem whose kernel adds up over cuts of K, with scratch memory for them."""
    problem = Problem(m=1, n=320, k=4096, math_mode="reduced")
    for candidate in BACKENDS["triton"].candidates(problem):
        solution = program.solution(problem, candidate)
        if json.loads(solution.launch)["workspace_bytes"]:
            return problem, solution
    pytest.skip("no kernel of ours has scratch memory")


def test_graphs_give_their_scratch_memory_to_the_next_when_they_are_gone(program: Program) -> None:
    """The driver holds it for the graph (user objects), so nothing waits for a guess of how long a replay takes."""
    problem, solution = reducing(program)
    program.publish(solution)
    abc = operands(problem)
    product(*abc)
    torch.cuda.synchronize()

    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    before = 0
    for number in range(40):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = product(*abc)
        graph.replay()
        assert error(inside, *abc) <= 1e-2
        del graph, inside
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if number == 8:
            before = used()
    assert used() - before < 8 << 20, "forty graphs took memory that nobody gave back"


@pytest.mark.parametrize("right", [True, False])
def test_the_live_check_keeps_a_right_kernel_and_finds_a_wrong_one(program: Program, right: bool) -> None:
    problem, candidate = gemv(n=512 if right else 640)
    solution = program.solution(problem, candidate)
    if not right:  # it takes Y's rows for fewer than they are: what it leaves is whatever lay there
        facts = json.loads(solution.launch)
        facts["grid"][0] = {"block": 1}
        solution = replace(solution, launch=json.dumps(facts))
    program.hook.native.live_check(1)
    try:
        program.publish(solution)
        x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (1, problem.n))
        junk = torch.full((1, problem.n), 1e4, device="cuda", dtype=torch.bfloat16)
        del junk  # the result's memory, if the kernel does not write it
        y = torch.nn.functional.linear(x, w)
        assert error(y, x, w.t(), None) < 5e-3, "torch's result is kept"
        found = program.hook.native.failures()
        assert [how for _, how, _ in found] == ([] if right else ["wrong"])
    finally:
        program.hook.native.live_check(0)


def test_two_hundred_solutions_are_active_within_a_second(program: Program) -> None:
    solutions = []
    for n in range(8, 8 * 101, 8):
        problem = Problem(m=8, n=n, k=1024, math_mode="reduced")
        solutions.append(program.solution(problem, next(BACKENDS["cublaslt"].candidates(problem))))
    triton = [gemv(n=n) for n in (256, 512, 1024, 2048)]
    for problem, candidate in triton:
        one = program.solution(problem, candidate)
        # the same binary under other sizes: what loading costs is the row and the file
        solutions += [replace(one, problem=replace(problem, n=problem.n + 8 * i + 4096)) for i in range(25)]
    start = time.perf_counter()
    program.publish(*solutions)

    assert time.perf_counter() - start < 1 and gemmtuned.status()["rows"] == 400


@TWO
def test_calls_run_on_the_device_of_their_operands_whatever_is_current(program: Program) -> None:
    problem, candidate = gemv()
    program.publish(program.solution(problem, candidate))
    for device in (1, 0):
        x, w = (torch.randn(rows, 1024, device=f"cuda:{device}", dtype=torch.bfloat16) for rows in (1, 256))
        with torch.cuda.device(1 - device):
            y = torch.nn.functional.linear(x, w)
        assert y.device == x.device and error(y, x, w.t(), None) < 5e-3
    assert not program.hook.native.failures() and cublaslt.version()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_scaled_products_are_counted_by_either_of_torchs_functions(program: Program, scaling: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs sm_89")
    if not hasattr(torch.nn.functional, "scaled_mm"):
        pytest.skip("torch has no torch.nn.functional.scaled_mm")
    recipe = getattr(torch.nn.functional.ScalingType, {"row": "RowWise", "tensor": "TensorWise"}[scaling])
    m, n, k = 32, 64, 128
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    shapes = ((m, 1), (1, n)) if scaling == "row" else ((), ())
    scale_a, scale_b = (torch.rand(shape, device="cuda") for shape in shapes)
    expected = Problem(
        family="scaled", m=m, n=n, k=k, dtype="fp8_e4m3", wdtype="fp8_e4m3", out_dtype="bf16", scale=scaling
    )
    program.hook.native.drain()

    old = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)
    assert [(s.problem, s.calls) for s in program.hook.native.drain() if s.calls] == [(expected, 1)]
    new = torch.nn.functional.scaled_mm(a, b.t(), scale_a, recipe, scale_b, recipe, output_dtype=torch.bfloat16)
    assert [(s.problem, s.calls) for s in program.hook.native.drain() if s.calls] == [(expected, 1)]

    torch.testing.assert_close(new, old, rtol=2e-2, atol=2e-2)
