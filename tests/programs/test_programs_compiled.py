"""torch.compile: extern GEMMs counted and routed, templates noted, and a reload recompiles nothing."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from hooked import Home
from operators_of_torch import OPERATORS

pytestmark = pytest.mark.long  # Inductor and a compiler of C++

# Graphs are compiled anew in each test; the C++ they lead to may come from the cache
ANEW = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
REPORT = """
    import sys
    sys.argv[1:] = ["coverage", "--json"]
    from gemmtuned.cli import main
    main()
    """


@pytest.mark.long
def test_a_reload_reaches_compiled_code_and_recompiles_nothing(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from torch._dynamo.utils import counters
        from hooked import publish, published
        from programs_counted import counted
        import gemmtuned
        from gemmtuned.hooks import activate

        hook = activate.current()
        hook.stop()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        xs = [torch.randn(m, 16) for m in (3, 5, 7)]
        said = []

        def compilations():
            return [counters["stats"]["unique_graphs"], sum(counters["frames"].values())]

        with torch.no_grad():
            eager = [model(x) for x in xs]
            list(hook.drain())
            ys = [compiled(x) for x in xs]
            before, seen = compilations(), counted(hook)
            said.append([sorted((p.m, p.n, p.k, n) for p, n in seen.items()),
                         all(torch.allclose(y, e, atol=1e-5) for y, e in zip(ys, eager))])
            for generation, backend in enumerate(("torch_swap", "torch"), 1):
                publish(hook.settings.config_dir, [published(p, backend) for p in seen], generation)
                assert gemmtuned.reload() == generation
                ys = [compiled(x) for x in xs for _ in range(3)]
                outcomes = {}
                for s in hook.drain():
                    outcomes[s.outcome] = outcomes.get(s.outcome, 0) + s.calls
                right = all(torch.allclose(y, eager[i // 3], atol=1e-5) for i, y in enumerate(ys))
                said.append([outcomes, right, compilations() == before])
        print(json.dumps([said, hook.native.failures()]))
        """,
        **ANEW,
    )
    (counts, *reloads), failures = done.said

    assert counts == [[[m, n, k, 1] for m in (3, 5, 7) for n, k in ((4, 8), (8, 16))], True]
    assert reloads == [[{"exact": 18}, True, True]] * 2
    assert failures == []


@pytest.mark.long
def test_a_gemm_inside_inductors_own_kernel_is_noted_and_not_counted(home: Home) -> None:
    done = home.run(
        """
        import json, sys, torch, gemmtuned
        from gemmtuned.hooks import activate
        from programs_counted import counted

        assert "torch._inductor.scheduler" not in sys.modules
        hook = activate.current()
        hook.stop()

        def block(a, b):
            return torch.relu(a @ b)

        a, b = torch.randn(4, 16, 64), torch.randn(4, 64, 32)
        with torch.no_grad():
            right = block(a, b)
            list(hook.drain())
            # templates alone, so that the test does not depend on this machine's timing
            options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
            compiled = torch.compile(block, fullgraph=True, options=options)
            y = compiled(a, b)
            seen = counted(hook).total()
        hook.flusher.flush()
        import torch._inductor.scheduler as scheduler
        patched = scheduler.Scheduler.codegen
        gemmtuned.disable()
        removed = patched is not scheduler.Scheduler.codegen
        print(json.dumps([seen, torch.allclose(y, right, atol=1e-4), removed]))
        """,
        **ANEW,
    )

    assert done.said == [0, True, True]
    with sqlite3.connect(home.path / "tune.db") as conn:
        rows = conn.execute("SELECT problem, run, kernel FROM compiled").fetchall()
    assert rows == [("batched:fp32:4x16x32x64,layout=nn,threads=2", "test", "CppTemplate")]
    said = json.loads(home.run(REPORT, AITER_TUNE_GEMM="0").out.splitlines()[-1])
    assert said["compiled_problems"] == 1
    assert said["notes"] == [
        "1 problem is inside kernels that torch.compile made (view compiled): neither counted here nor routed."
    ]


def test_calls_by_which_inductor_chooses_a_kernel_are_no_traffic(home: Home) -> None:
    """It calls each candidate for a tenth of a second or more: thousands of calls where the program makes three."""
    done = home.run(
        """
        import json, torch, gemmtuned
        compiled = torch.compile(lambda a, b: torch.relu(a @ b), options={
            "max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,CPP",
            "autotune_local_cache": False,  # it would take an earlier run's times
        })
        a, b = torch.randn(4, 16, 64), torch.randn(4, 64, 32)
        with torch.no_grad():
            for _ in range(3):
                compiled(a, b)
        from torch._inductor.select_algorithm import AlgorithmSelectorCache as choice
        patched = vars(choice)["benchmark_choices"]
        gemmtuned.disable()
        removed = patched is not vars(choice)["benchmark_choices"]
        print(json.dumps([removed, "gemmtuned" in choice.benchmark_choices.__func__.__module__]))
        """,
        **ANEW,
    )
    assert done.said == [True, False]
    assert home.calls() in (0, 3), "none where its own kernel was faster"
    with sqlite3.connect(home.path / "tune.db") as conn:
        rows = conn.execute("SELECT phase, problem, calls > 3 FROM phases").fetchall()
    assert rows == [("autotuning", "batched:fp32:4x16x32x64,layout=nn,threads=2", 1)]


CPP_WRAPPED = """
        import json, torch
        from gemmtuned.hooks import activate
        from programs_counted import counted

        hook = activate.current()
        hook.stop()
        if {torchs_first}:  # as in a program that loads torch's symbols for all
            hook.patches.compiled.counted = False
        model = torch.nn.Sequential(torch.nn.Linear(26, 24), torch.nn.ReLU(), torch.nn.Linear(24, 20, bias=False))
        x, c = torch.randn(10, 26), torch.randn(10, 20)
        with torch.no_grad():
            right = torch.addmm(c, model(x), torch.eye(20))
            compiled = torch.compile(lambda x, c: torch.addmm(c, model(x), torch.eye(20)), fullgraph=True)
            list(hook.drain())
            y = compiled(x, c)
            seen = counted(hook)
        hook.flusher.flush()
        print(json.dumps([sorted(f"{{p}} {{n}}" for p, n in seen.items()), torch.allclose(y, right, atol=1e-4)]))
        """


@pytest.mark.soak
def test_products_of_a_cpp_wrapper_are_counted(home: Home) -> None:
    done = home.run(CPP_WRAPPED.format(torchs_first=False), **ANEW, TORCHINDUCTOR_CPP_WRAPPER="1")

    seen, right = done.said
    assert right
    assert [text.replace("_mkldnn", "") for text in seen] == [
        "dense_add:fp32:10x20x20,layout=nn,threads=2 1", "fp32:10x20x24,threads=2 1", "fp32:10x24x26+bias,threads=2 1",
    ]  # fmt: skip
    said = json.loads(home.run(REPORT, AITER_TUNE_GEMM="0").out.splitlines()[-1])
    assert (said["compiled_problems"], said["compiled_cpp_problems"]) == (0, 0)


@pytest.mark.long
def test_products_of_a_cpp_wrapper_past_us_are_noted_with_their_shapes_and_told(home: Home) -> None:
    done = home.run(CPP_WRAPPED.format(torchs_first=True), **ANEW, TORCHINDUCTOR_CPP_WRAPPER="1")

    assert done.said[1]
    with sqlite3.connect(home.path / "tune.db") as conn:
        rows = conn.execute("SELECT problem, kernel FROM compiled ORDER BY problem").fetchall()
    assert {problem.split(",")[0].replace("_mkldnn", "") for problem, _ in rows} >= {
        "fp32:10x24x26+bias", "fp32:10x20x24", "dense_add:fp32:10x20x20",
    }  # fmt: skip
    assert {kernel for _, kernel in rows} == {"compiled C++"}
    said = json.loads(home.run(REPORT, AITER_TUNE_GEMM="0").out.splitlines()[-1])
    assert (said["compiled_problems"], said["compiled_cpp_problems"]) == (0, 3)
    assert said["notes"] == [
        "test: 3 products run in compiled C++ and are not counted (view compiled): a C++ wrapper or AOTInductor calls "
        "them past the dispatcher."
    ]


def test_code_that_is_loaded_later_finds_our_functions_and_they_do_what_torchs_do(home: Home) -> None:
    """As AOTInductor's packages call them: by handles, through the symbols that the program has."""
    done = home.run(
        """
        import ctypes, json, torch
        from gemmtuned.hooks import activate
        from programs_counted import counted

        hook = activate.current()
        hook.stop()
        program = ctypes.CDLL(None)  # what a library that is loaded now would find
        torch.manual_seed(0)

        def call(name, *operands, numbers=()):
            handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(operands))
            function = getattr(program, "aoti_torch_cpu_" + name)
            done = function(*map(pointer, handles), *map(ctypes.c_double, numbers))
            for handle in handles:
                torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(handle)  # and so freed
            return done

        inside = ctypes.pythonapi.PyCapsule_GetPointer
        inside.restype, inside.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

        def pointer(capsule):
            return ctypes.c_void_p(inside(capsule, None))

        x, w, c = torch.randn(6, 8), torch.randn(8, 5), torch.randn(6, 5)
        b1, b2, bc = torch.randn(3, 6, 8), torch.randn(3, 8, 5), torch.randn(3, 6, 5)
        i1, i2 = torch.ones(6, 8, dtype=torch.int8), torch.ones(8, 5, dtype=torch.int8)
        z = torch.randn(6, 8, dtype=torch.complex64)
        list(hook.drain())
        said = []
        for name, wanted, operands, numbers in (
            ("mm_out", x @ w, (x, w), ()),
            ("addmm_out", torch.addmm(c, x, w, beta=2, alpha=3), (c, x, w), (2, 3)),
            ("bmm_out", b1 @ b2, (b1, b2), ()),
            ("baddbmm_out", torch.baddbmm(bc, b1, b2), (bc, b1, b2), (1, 1)),
            ("_int_mm_out", torch._int_mm(i1, i2), (i1, i2), ()),
            ("mm_out", z.conj() @ w.to(z.dtype), (z.conj(), w.to(z.dtype)), ()),
        ):
            y = torch.empty_like(wanted)
            list(hook.drain())
            code = call(name, y, *operands, numbers=numbers)
            said.append([name, code, torch.allclose(y, wanted), counted(hook).total()])
        y = torch.empty(6, 5)
        said.append(["wrong sizes", call("mm_out", y, x, c)])
        print(json.dumps([hook.native.has_shims, said]))
        """
    )
    has_shims, said = done.said

    assert has_shims
    assert said[:-1] == [
        [name, 0, True, 1] for name in ("mm_out", "addmm_out", "bmm_out", "baddbmm_out", "_int_mm_out", "mm_out")
    ]
    assert {name for name, *_ in said[:-1]} == {name.replace(".", "_") for name in OPERATORS.compiled}
    assert said[-1] == ["wrong sizes", 1]


PACKAGE = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(26, 24), torch.nn.ReLU(), torch.nn.Linear(24, 20, bias=False)).eval()
    torch.manual_seed(0)
    program = torch.export.export(model, (torch.randn(10, 26),))
    options = {{"aot_inductor.compile_wrapper_opt_level": "O0"}}
    torch._inductor.aoti_compile_and_package(program, package_path={path!r}, inductor_configs=options)
    print("{{}}")
    """


@pytest.mark.soak  # the compiler takes half a minute
def test_a_package_that_another_process_compiled_is_counted_and_routed(home: Home, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt2")
    home.run(PACKAGE.format(path=path), fresh=True, timeout_s=300, AITER_TUNE_GEMM="0")
    assert Path(path).is_file()
    done = home.run(
        f"""
        import json, torch
        from gemmtuned.hooks import activate
        from hooked import publish, published
        from programs_counted import counted
        import gemmtuned

        hook = activate.current()
        hook.stop()
        model = torch._inductor.aoti_load_package({path!r})
        x = torch.randn(10, 26)
        list(hook.drain())
        right = [model(x) for _ in range(4)]
        seen = counted(hook)
        publish(hook.settings.config_dir, [published(p, "torch_swap") for p in seen], 1)
        gemmtuned.reload()
        y = model(x)
        outcomes = {{s.outcome for s in hook.drain()}}
        print(json.dumps([sorted(f"{{p}} {{n}}" for p, n in seen.items()), sorted(outcomes),
                          torch.allclose(y, right[0], atol=1e-5)]))
        """
    )

    assert done.said == [["fp32:10x20x24,threads=2 4", "fp32:10x24x26+bias,threads=2 4"], ["exact"], True]
