"""The Triton backend without a GPU: what it offers, what it publishes, and its kernels through the numeric gate."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from matrices import matrix

pytest.importorskip("triton")

from store_cases import found, lease, open_store, saw

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, cpu_device
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.backends.base import CompiledBackend
from gemmtuned.kernels.backends.triton_ import Triton
from gemmtuned.kernels.triton import source

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
BACKEND = Triton(device=H200)
PROBLEM = Problem(m=8, n=256, k=7168)


@pytest.mark.long
def test_listing_the_backends_imports_no_triton() -> None:
    code = "import sys, gemmtuned.kernels.backends as b; from gemmtuned.configs.solution import cpu_device\n"
    code += "b.environment(cpu_device()); assert 'triton' not in sys.modules"
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


def test_its_solutions_hold_on_cuda_for_one_triton_and_one_architecture() -> None:
    import triton

    assert BACKENDS["triton"].stamps(H200) == {
        f"triton.{name}": f"{name}/{triton.__version__}/sm_90/{of}" for name, of in source.kernel_hashes().items()
    }
    assert set(source.kernel_hashes()) == set(catalog.kernels("triton"))
    assert "triton" not in environment(cpu_device()).backends
    assert BACKENDS["triton"].stamps(replace(H200, kind="rocm", arch="gfx942")) == {}


def test_the_stamp_tells_no_spelling_of_a_text() -> None:
    texts = ('f"{a[\'b\']}" "c"', "f'{a[\"b\"]}c'", 'f"""{a["b"]}""" "c"')  # the last in Python 3.12 only
    written = {source._written(ast.parse(text)) for text in texts[: 3 if sys.version_info >= (3, 12) else 2]}

    assert len(written) == 1
    assert source._written(ast.parse("f'{a[\"b\"]}d'")) not in written


def test_it_offers_candidates_for_plain_dense_16_bit_problems_only() -> None:
    for good in (PROBLEM, replace(PROBLEM, dtype="fp16", wdtype="", out_dtype="", bias=True, math_mode="reduced")):
        found = list(BACKEND.candidates(good))
        assert found and len(set(found)) == len(found) <= 24
        assert all(c.backend == "triton" and "kernel" in json.loads(c.config) for c in found)
    for bad in (
        {"threads": 2},
        {"layout": "nn"},
        {"weight_state": "packed"},
        {"family": "batched_add", "batch": 2},
        {"dtype": "fp32", "wdtype": "fp32", "out_dtype": "fp32"},
        {"out_dtype": "fp32"},
    ):
        assert not list(BACKEND.candidates(replace(PROBLEM, **bad)))


def test_without_a_device_it_offers_nothing() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert not list(BACKENDS["triton"].candidates(PROBLEM))
    with pytest.raises(CandidateFailed, match="no CUDA device"):
        BACKENDS["triton"].prepare(next(BACKEND.candidates(PROBLEM)), PROBLEM)


@pytest.mark.long
def test_what_is_published_is_the_binary_and_how_to_launch_it() -> None:
    compiled = {backend.name for backend in BACKENDS.values() if isinstance(backend, CompiledBackend)}
    assert compiled == set(catalog.FOLDERS)
    for problem in (PROBLEM, replace(PROBLEM, bias=True), PROBLEM.with_m(1)):
        candidate = next(BACKEND.candidates(problem))

        text, binary = BACKEND.launch_of(candidate, problem)

        facts = json.loads(text)
        config = json.loads(candidate.config)
        assert text == json.dumps(facts, sort_keys=True, separators=(",", ":"))
        assert facts["binary"] == sha256(binary).hexdigest() and binary[:4] == b"\x7fELF"
        tokens = config.get("tokens", {"gemv": 1, "selected": 16}.get(config["kernel"]))
        assert facts["name"] == f"gemmtuned_{config['kernel']}_{problem.n}x{problem.k}_m{tokens}"
        assert facts["name"].encode() in binary
        assert facts["v"] == 2 and facts["threads"] == 32 * config["warps"]
        assert facts["grid"][0] == {"of": "w.size0", "block": config["rows"]} and len(facts["grid"]) == 3
        assert ("bias.ptr" in facts["arguments"]) == problem.bias
        assert {("x.size0", "<=", problem.m), ("x.stride0", "%", 8), ("w.ptr", "%", 16)} <= set(
            map(tuple, facts["conditions"])
        )
        assert facts["arguments"][-2:] == ["null", "null"]  # Triton 3.6


@pytest.mark.parametrize(
    "config", ["{}", "[]", "nonsense", '{"kernel":"os"}', '{"kernel":"gemv","rows":1}', '{"kernel":[]}']
)
def test_a_config_that_is_none_of_ours_is_a_failed_candidate(config: str) -> None:
    with pytest.raises(CandidateFailed):
        BACKEND.launch_of(Candidate("triton", config), PROBLEM.with_m(1))
    assert not BACKEND.holds(Candidate("triton", config), PROBLEM.with_m(1))


def test_what_a_kernel_was_published_for_that_is_gone_is_left_to_torch_and_tuned_anew(tmp_path: Path) -> None:
    now = Environment(H200, {"torch": "2.11", **BACKENDS["triton"].stamps(H200)})
    before = Environment(H200, {**now.stamps, "triton.gone": "gone/3.6.0/sm_90/of-then"})
    gone = Candidate.of("triton", kernel="gone", rows=2)
    solution = found(PROBLEM, before, gone.backend, config=gone.config, stamp=before.stamp_of(gone))
    store = open_store(tmp_path)
    store.solutions.install(None, [solution], environment=before, now_s=0)
    store.sightings.add("serve", now, [saw(PROBLEM.with_m(4)), saw(PROBLEM, 2)], now_s=0)

    table = build_table(store.solutions.published()[1], {"cuda:0": now}, generation=1, failed=frozenset())
    work = [lease(store, now_s=0, environment=now) for _ in range(2)]

    assert table.find(PROBLEM, place="cuda:0") == ("miss", None)
    assert table.refused == {"backend triton is of another version (gone/3.6.0/sm_90/of-then)": 1}
    assert [one.problem for one in work] == [PROBLEM, PROBLEM.with_m(4)]
    assert gone in store.hints.seeds(work[1]) and not BACKEND.holds(gone, PROBLEM.with_m(4))  # so no search tries it
    with pytest.raises(CandidateFailed, match="names no kernel of ours"):  # who asks for it is told
        BACKEND.prepare(gone, PROBLEM)
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("case", matrix(range(9), [1]))  # the other kernels run in test_kernels_triton.py
def test_kernels_pass_the_numeric_gate_in_the_interpreter(case: int) -> None:
    script = Path(__file__).parents[1].joinpath("support", "triton_verified.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(script.parent)

    done = subprocess.run(
        [sys.executable, "-P", script, str(case)], env=env, capture_output=True, text=True, timeout=110
    )

    assert done.returncode == 0, done.stderr[-2000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) == 1 and all(outcome == "ok" for _, outcome, _ in seen), seen


def test_the_math_mode_of_a_cuda_problem_is_set_on_hosts_whose_cpu_knows_no_fp16() -> None:
    import torch

    from gemmtuned.kernels.torch_flags import as_called

    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    with as_called(replace(PROBLEM, math_mode="reduced")):
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    with as_called(PROBLEM):
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == before


@pytest.mark.long
def test_a_kernels_stamp_changes_with_what_it_is_made_of_and_with_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "triton"
    shutil.copytree(Path(source.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(source, "__file__", str(folder / "source.py"))

    def hashes() -> dict[str, str]:
        source.kernel_hashes.cache_clear()
        return source.kernel_hashes()

    first = hashes()
    in_clusters, decoding = {"fragments", "selected", "tiles", "warp_split_k"}, {"mxfp4_tiles", "weight_only_tiles"}
    for name, old, new, changed in (
        ("gemv", "return 64 if arch", "return 32 if arch", set()),
        ("gemv", "tl.sum(acc, 1), partials", "tl.sum(acc, 1) * 2, partials", {"gemv"}),
        ("load_barrier", "which a thread block has only", "known only", set()),  # a docstring
        (
            "split_k",
            "tl.atomic_add",
            "tl.atomic_max",
            {"gemv", "int_tiles", "tiles", "warp_split_k", *decoding},
        ),  # of those that import it
        ("diagonal", "bar.sync 0;", "", {"gemv"}),  # in what a text of PTX is made by
        ("diagonal", "WARPS_ADDED_UP: Final = (2, 4, 8)", "WARPS_ADDED_UP: Final = (2, 4)", {"gemv"}),
        ("cluster", "[$barrier], 0;", "[$barrier], 1;", in_clusters),  # one of two constants made in one statement
        ("inline_ptx", '",".join(constraints)', '",".join(reversed(constraints))', {"gemv", *in_clusters, *decoding}),
        ("row_products", "k < K", "k <= K", {"batched", "grouped"}),
        (
            "launch",
            "EXCHANGE_PAD: Final = 8",
            "EXCHANGE_PAD: Final = 4",
            in_clusters,
        ),  # of another file
    ):
        path = folder / f"{name}.py"
        before = path.read_text()
        path.write_text(before.replace(old, new))
        assert path.read_text() != before
        now = hashes()
        assert {kernel for kernel in first if now[kernel] != first[kernel]} == changed, name
        path.write_text(before)
    shutil.copy(folder / "gemv.py", folder / "other.py")
    (folder / "other.py").write_text((folder / "gemv.py").read_text().replace('"gemv"', '"other"'))
    assert {name: of for name, of in hashes().items() if name != "other"} == first
    (folder / "gemv.py").unlink()
    assert "gemv" not in hashes()
    monkeypatch.undo()
    source.kernel_hashes.cache_clear()
