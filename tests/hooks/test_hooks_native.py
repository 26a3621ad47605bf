"""The native hook: what it counts, and that nobody can tell its results from stock torch's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_programs import PROGRAMS
from hooked import HERE, LINEAR, ForkServer, Home, publish, published
from hypothesis import given
from hypothesis import strategies as st
from operators_of_torch import OPERATORS

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.padding import COVERS, padded_m
from gemmtuned.configs.problem import DTYPES, FAMILIES, LAYOUTS, MATH_MODES, MAX_DIM, SCALES, Problem
from gemmtuned.hooks import native
from gemmtuned.hooks.native.build import build, library_path

ROUTED = ("torch_swap", "torch_mv", "onednn")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: ForkServer) -> Any:
    """Every program under every backend, in one process."""
    folder = tmp_path_factory.mktemp("matrix")
    home = Home(folder / "home", native_cache, fork_server.compiling)
    done = home.run(f"import runpy, sys; sys.argv = ['', {str(folder / 'said.json')!r}]; "
                    f"runpy.run_path({str(HERE / 'hook_matrix.py')!r}, run_name='__main__')",
                    AITER_TUNE_GEMM="0")  # fmt: skip
    assert done.code == 0, done.err
    return json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_and_results_are_stock_torchs(matrix: Any, name: str) -> None:
    found = matrix["captured"][name]

    assert found["differs"] == ""
    if PROGRAMS[name].counts is not None:
        assert found["counts"] == PROGRAMS[name].counts
    assert set(found["outcomes"]) <= {"miss"}


@pytest.mark.parametrize("backend", ROUTED)
def test_routed_results_differ_from_stock_in_rounding_alone(matrix: Any, backend: str) -> None:
    differs = {name: found["differs"] for name, found in matrix[backend].items() if found["differs"]}

    assert differs == {}


@pytest.mark.parametrize("backend", ROUTED)
def test_a_route_changes_the_outcome_and_not_the_counts(matrix: Any, backend: str) -> None:
    for name, found in matrix[backend].items():
        assert found["counts"] == matrix["captured"][name]["counts"], name
    hits = sum(found["outcomes"].get("exact", 0) for found in matrix[backend].values())
    assert hits >= {"torch_swap": 90, "torch_mv": 8, "onednn": 50}[backend]


def test_no_route_is_blamed_for_calls_that_torch_refuses(matrix: Any) -> None:
    assert matrix["failures"] == []


def test_routes_are_bit_equal_to_the_python_backends(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from hooked import publish, published
        import gemmtuned
        from gemmtuned.configs.problem import Problem
        from gemmtuned.configs.solution import Candidate
        from gemmtuned.hooks import activate, native
        from gemmtuned.kernels.backends import BACKENDS
        from gemmtuned.kernels.families import family_of

        hook = activate.current()
        hook.stop()
        generation, wrong, tried = 0, [], 0
        for backend in ("torch_swap", "torch_mv", "onednn"):
            cases = []
            for m, n, k in ((1, 24, 40), (1, 1, 8), (5, 1, 9), (3, 33, 17), (64, 48, 32)):
                for dtype in ("fp32", "bf16"):
                    for bias in (False, True):
                        cases.append(Problem(m=m, n=n, k=k, dtype=dtype, bias=bias, threads=2))
                for family in ("batched", "dense_add", "batched_add"):
                    batch = 3 if family.startswith("batched") else 1
                    cases.append(Problem(family=family, batch=batch, m=m, n=n, k=k, dtype="fp32", threads=2))
            cases = [p for p in cases if tuple(BACKENDS[backend].candidates(p))]
            generation += 1
            publish(hook.settings.config_dir, [published(p, backend) for p in cases], generation)
            assert gemmtuned.reload() == generation
            for p in cases:
                inputs = family_of(p).make(p, kind="randn", seed=1, device=torch.device("cpu"))
                list(hook.native.drain())
                y = inputs.run(family_of(p).default(p))
                (seen,) = hook.native.drain()
                hook.native.set_switches(native.OFF)
                z = inputs.run(BACKENDS[backend].prepare(Candidate(backend), p))
                hook.native.set_switches(native.CAPTURE | native.DISPATCH)
                tried += 1
                # a vector is both row- and column-major: its layout is the look-up's business
                if seen.outcome != "exact" and p.n > 1 and p.m > 1:
                    wrong.append(f"{backend} {p}: {seen}")
                if not torch.equal(y, z) or y.stride() != z.stride():
                    wrong.append(f"{backend} {p}: {(y - z).abs().max()} {y.stride()} {z.stride()}")
        print(json.dumps([tried, wrong]))
        """
    )
    tried, wrong = done.said

    assert wrong == []
    assert tried > (40 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 35)  # oneDNN has nothing for bf16 there


def test_eight_threads_lose_nothing(home: Home) -> None:
    done = home.run(
        """
        import json, threading, torch
        from gemmtuned.hooks import activate

        hook = activate.current()
        hook.stop()
        x, ws = torch.randn(2, 3), [torch.randn(3, n) for n in range(1, 101)]
        stop, drained = threading.Event(), []

        def drain():
            while not stop.is_set():
                drained.extend(hook.native.drain())

        def work():
            for w in ws * 100:
                torch.mm(x, w)

        threads = [threading.Thread(target=work) for _ in range(8)]
        drainer = threading.Thread(target=drain)
        drainer.start()
        [t.start() for t in threads]
        [t.join() for t in threads]
        stop.set()
        drainer.join()
        drained.extend(hook.native.drain())
        sums = {}
        for s in drained:
            sums[str(s.problem)] = sums.get(str(s.problem), 0) + s.calls
        print(json.dumps([len(sums), sorted(set(sums.values()))]))
        """
    )

    assert done.said == [100, [800]]


def test_a_drain_ends_where_problems_are_counted_again_faster_than_they_are_read(home: Home) -> None:
    """In C++, where no thread waits for the GIL: 8 threads with 400 problems each, again every half millisecond."""
    done = home.run(
        """
        import json, threading, warnings
        import torch
        from gemmtuned.hooks import activate

        hook = activate.current()
        hook.stop()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")

        products = torch.jit.CompilationUnit('''
        def products(x, ws: List[Tensor], ys: List[Tensor]):
            for _ in range(20):
                for w, y in zip(ws, ys):
                    torch.mm(x, w, out=y)
        ''').products
        x, ws = torch.randn(1, 1), [torch.randn(1, n) for n in range(1, 401)]
        stop, made, drains = threading.Event(), [], []

        def work():
            ys = [torch.empty(1, n) for n in range(1, 401)]
            with torch.inference_mode():
                while not stop.is_set():
                    products(x, ws, ys)
                    made.append(20 * 400)

        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]
        while len(drains) < 5 or len(made) < 16:
            drains.append([])
            for s in hook.native.drain():
                drains[-1].append(s.calls)
                if len(drains[-1]) > 50_000:  # of 3,200 that there are, and some of outgrown segments
                    break
        stop.set()
        [t.join() for t in threads]
        drains.append([s.calls for s in hook.native.drain()])
        print(json.dumps([max(map(len, drains)), sum(map(sum, drains)) - sum(made)]))
        """
    )
    most, more = done.said

    assert most <= 16_000
    assert more == 0


@pytest.mark.long
def test_eight_processes_give_exactly_the_sums(home: Home) -> None:
    done = home.run(
        """
        import multiprocessing, torch
        torch.set_num_threads(1)
        x, ws = torch.randn(1, 1), [torch.randn(1, n) for n in range(1, 501)]

        def work():
            with torch.inference_mode():
                for _ in range(400):
                    for w in ws:
                        torch.mm(x, w)

        processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(8)]
        [p.start() for p in processes]
        [p.join() for p in processes]
        print([p.exitcode for p in processes])
        """,
        GEMMTUNED_FLUSH_S="0.5",
    )

    assert done.said == [0] * 8
    # on a machine in use one may wait for the seven others longer than a flush does: it says so and loses nothing
    waits = ("gemmtuned: counts stay in memory reason=", "locked by another process")
    assert [line for line in done.ours if not (line.startswith(waits[0]) and waits[1] in line)] == []
    counts = home.counts()
    assert len(counts) == 500
    assert set(counts.values()) == {8 * 400}


def test_one_call_in_64_is_timed_unless_a_route_serves_it(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import json, torch, gemmtuned
        from gemmtuned.hooks import activate
        hook = activate.current()
        hook.stop()
        list(hook.native.drain())
        for w in (torch.randn(8, 16), torch.randn(40, 40)):
            gemmtuned.reload()
            x = torch.randn(4, w.shape[1])
            for _ in range(640):
                torch.mm(x, w.t())
        print(json.dumps({s.outcome: [s.calls, s.sampled_calls, s.sampled_us] for s in hook.native.drain()}))
        """,
        GEMMTUNED_RELOAD="manual",
    )

    calls, sampled, us = done.said["miss"]
    assert (calls, sampled) == (640, 10)
    assert us / sampled > 0.1
    assert done.said["exact"] == [640, 0, 0]


@pytest.mark.long
def test_compiled_code_is_counted_at_every_call(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from gemmtuned.hooks import activate

        hook = activate.current()
        hook.stop()
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
        x = torch.randn(4, 16)

        def count(run, calls):
            list(hook.native.drain())
            ys = [run() for _ in range(calls)]
            return sum(s.calls for s in hook.native.drain()), ys[-1]

        said = {}
        eager = model(x)
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            with torch.no_grad():
                calls, y = count(lambda: compiled(x), 11)
            said[backend] = [calls, torch.allclose(y, eager, atol=1e-5), y.stride() == eager.stride()]
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        params = list(model.parameters())
        model(x).sum().backward()
        grads = [p.grad.clone() for p in params]

        def step():
            for p in params:
                p.grad = None
            compiled(x).sum().backward()

        calls, _ = count(step, 3)
        said["training"] = [calls, all(torch.equal(p.grad, g) for p, g in zip(params, grads))]
        print(json.dumps(said))
        """,
    )

    assert done.said["aot_eager"] == [22, True, True]
    assert done.said["inductor"] == [22, True, True]
    # forward 2; backward: two weight gradients and one input gradient
    assert done.said["training"] == [3 * 5, True]


@pytest.mark.long
def test_data_loader_workers_are_counted(home: Home) -> None:
    module = home.path.parent / "rows.py"
    module.write_text(
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 12\n"
        "    def __getitem__(self, i): return torch.mm(torch.full((3, 5), float(i)), torch.ones(5, 7))\n"
    )
    done = home.run(
        """
        import json, sys, torch
        if __name__ == "__main__":
            sys.path.append(sys.argv[1])
            from rows import Rows
            torch.mm(torch.ones(3, 5), torch.ones(5, 7))  # counted in the parent, and not again in its children
            sums = []
            for how, workers in (("fork", 2), ("spawn", 1)):
                loader = torch.utils.data.DataLoader(
                    Rows(), batch_size=3, num_workers=workers, multiprocessing_context=how
                )
                sums.append(sum(batch.sum().item() for batch in loader))
            print(json.dumps(sums))
        """,
        str(module.parent),
        PYTHONPATH=os.pathsep.join([str(HERE), str(module.parent)]),
        fresh=True,
    )

    assert done.said == [sum(range(12)) * 5 * 21.0] * 2
    by_size: dict[str, int] = {}
    for (problem, _), calls in home.counts().items():
        size = problem.split(",")[0]
        by_size[size] = by_size.get(size, 0) + calls
    assert by_size == {"fp32:3x7x5": 25}


# ---- the table's key


@pytest.fixture(scope="module")
def library(native_cache: Path) -> native.Native:
    """The library, loaded and not installed: this process is not hooked."""
    import torch  # noqa: F401  it links against torch's libraries

    return native.Native(build(native_cache))


@given(m=st.integers(1, MAX_DIM), n=st.integers(1, MAX_DIM), covers=st.sampled_from(COVERS))
def test_padding_is_the_same_in_both_languages(library: native.Native, m: int, n: int, covers: str) -> None:
    assert library.padded_m(m, n, covers) == padded_m(m, n, covers)


def test_padding_is_the_same_in_both_languages_at_the_ends_of_its_rules(library: native.Native) -> None:
    for m in (end + more for end in (1, 16, 256, 1024, 4096, 8192, 16384, MAX_DIM - 1) for more in (0, 1)):
        for n in (1, 4096, 4097):
            for covers in COVERS:
                assert library.padded_m(m, n, covers) == padded_m(m, n, covers), (m, n, covers)


SIZES = st.integers(1, MAX_DIM)
PROBLEMS = st.builds(
    Problem, scale=st.sampled_from(SCALES),
    family=st.sampled_from([f for f in FAMILIES if f != "moe"]), batch=SIZES, m=SIZES, n=SIZES, k=SIZES,
    bias=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)), wdtype=st.sampled_from(list(DTYPES)), out_dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from(LAYOUTS), weight_state=st.sampled_from(("plain", "packed")),
    math_mode=st.sampled_from(MATH_MODES), deterministic=st.booleans(), threads=st.integers(0, 32767),
)  # fmt: skip


@given(problem=PROBLEMS)
def test_a_problem_survives_packing(problem: Problem) -> None:
    assert native.unpack(native.pack(problem)) == problem


@pytest.mark.parametrize("column", [{"experts": 70_000}, {"topk": 300}, {"packing": "unheard_of"}])
def test_what_the_key_cannot_hold_is_refused(column: dict[str, Any]) -> None:
    with pytest.raises(ProblemError):
        native.pack(Problem(m=1, n=1, k=1, **column))


def test_a_library_that_others_could_have_written_is_refused(home: Home, tmp_path: Path) -> None:
    built = library_path(home.cache)
    assert built is not None
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    copy = folder / built.name
    copy.write_bytes(built.read_bytes())
    copy.chmod(0o775)
    code = """
        import json, torch, gemmtuned
        torch.nn.functional.linear(torch.ones(4, 16), torch.ones(8, 16))
        print(json.dumps([gemmtuned.status()["path"], gemmtuned.status()["note"]]))
        """
    path, note = home.run(code, GEMMTUNED_CACHE=str(tmp_path / "cache")).said

    assert path == "off"
    assert "can be written by others" in note


@pytest.mark.parametrize("detached", [True, False])
def test_a_build_beside_a_program_takes_what_that_leaves(detached: bool) -> None:
    autogroup = Path("/proc/self/autogroup")  # only where the kernel shares the CPU by session
    before = autogroup.read_text() if autogroup.exists() else ""
    script = (
        "import os, pathlib\n"
        "from gemmtuned.configs.priority import give_way\n"
        "give_way(19)\n"
        "group = pathlib.Path('/proc/self/autogroup')\n"
        "print(os.nice(0), *(group.read_text().split()[-1:] if group.exists() else []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, start_new_session=detached
    )

    own, *group = done.stdout.split()  # the file is empty for a process of no session's group
    assert own == "19"
    assert not detached or group in ([], ["19"])
    assert not before or autogroup.read_text() == before  # ours is not touched


def test_every_operator_of_the_list_is_hooked(native_cache: Path, home: Home) -> None:
    """operator_list.h is the one list: docs/reference/operators.md is written from it, and `make check` compares."""
    path = library_path(native_cache)
    assert path is not None
    operators = {name.removeprefix("CPU aten::") for name in native.Native(path).operators() if name.startswith("CPU ")}
    listed = set(OPERATORS.everywhere)
    done = home.run(
        """
        import json, torch
        hooked = {line.split(" ")[0] for line in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")}
        print(json.dumps(sorted(n.removeprefix("aten::") for n in hooked if n.startswith("aten::")
                                and "gemmtuned/hooks/native/c_api.cpp" in torch._C._dispatch_dump(n))))
        """
    )

    assert operators == listed == set(done.said)


def test_a_limit_on_openmps_threads_is_the_number_that_a_call_takes(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from gemmtuned.hooks.activate import current
        torch.set_num_threads(2)
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        print(json.dumps([s.problem.threads for s in current().native.drain()]))
        """,
        GEMMTUNED_FLUSH_S="1000",
        OMP_THREAD_LIMIT="1",
        fresh=True,
    )

    assert done.said == [1]


def test_a_call_sets_no_threads_numbers(home: Home) -> None:
    """torch sets OpenMP's number in each thread with the first of its loops there, which a product is not."""
    done = home.run(
        """
        import ctypes, json, threading, torch
        from hooked import LINEAR
        from gemmtuned.hooks.activate import current
        loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
        number = ctypes.CDLL(loaded.pop()).omp_get_max_threads
        torch.set_num_threads(number() + 1)
        found = []

        def in_a_thread():
            found.append(number())
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))
            found.append(number())
            torch.get_num_threads()  # as the first of those loops
            found.append(number())
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))

        thread = threading.Thread(target=in_a_thread)
        thread.start(), thread.join()
        keys = {s.problem.threads: s.calls for s in current().native.drain()}
        print(json.dumps([found, keys == {found[0]: 1, found[2]: 1}]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )
    (before, after, own), counted = done.said

    assert before == after
    assert own == before + 1
    assert counted, "each under the number that it ran with"
