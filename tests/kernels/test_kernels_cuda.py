"""The CUDA backend without a GPU: what it offers and compiles, what it publishes, and the cache of its compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import KernelLaunch, read_launch
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Candidate, Device, cpu_device
from gemmtuned.daemon.child.compile_main import compile_one
from gemmtuned.kernels import catalog
from gemmtuned.kernels.arch import shared_limit
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.backends.base import CompiledBackend
from gemmtuned.kernels.backends.cuda_ import Cuda
from gemmtuned.kernels.cuda import nvrtc, one_shot

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
A100 = Device("cuda-nvidia-a100-108", "cuda", "NVIDIA A100", "sm_80", 108)
BACKEND = Cuda(device=H200)
PROBLEM = Problem(m=64, n=576, k=7168)
WEIGHTS = (
    (576, 7168), (2112, 7168), (1280, 8192), (256, 7168), (7168, 2048), (4096, 4096), (1536, 7168), (512, 16384),
    (8192, 1024), (28672, 4096), (5120, 25600), (8, 64), (130, 4032),
)  # fmt: skip
needs_compiler = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")


def cached() -> list[Path]:
    return list((Settings.from_env().cache / nvrtc.FOLDER).glob("*"))


def test_its_solutions_hold_for_one_compiler_and_one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    assert BACKENDS["cuda"].stamps(H200) == {
        f"cuda.{name}": f"{name}/13.0/sm_90/{kernel.source_hash()}" for name, kernel in catalog.kernels("cuda").items()
    }
    assert "cuda" not in environment(cpu_device()).backends
    assert BACKENDS["cuda"].stamps(replace(H200, arch="sm_100")) == {}
    assert BACKENDS["cuda"].stamps(replace(H200, kind="rocm", arch="gfx942")) == {}
    assert isinstance(BACKENDS["cuda"], CompiledBackend)
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    assert BACKENDS["cuda"].stamps(H200) == {}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda text: text.replace("typedef", "// what follows are types\n  \ntypedef", 1), True),
        (lambda text: text.replace(" {\n", " {  /* begins\n here */\n"), True),
        (lambda text: text.replace("mapa.shared", "/*mapa*/.shared", 1), False),  # in a string
        (lambda text: text.replace("STEPS", "STEPS "), False),
        (lambda text: text.replace("#if BIAS\n", "#if 1\n"), False),
    ],
    ids=["a comment", "a comment of two lines", "a string", "code", "a condition"],
)
def test_a_comment_is_no_part_of_a_stamp(change: Callable[[str], str], same: bool) -> None:
    kernel = one_shot.KERNEL
    sources = list(kernel.samples())
    changed = [change(source) for source in sources]

    assert all(now != before for now, before in zip(changed, sources, strict=True))
    assert (replace(kernel, samples=lambda: changed).source_hash() == kernel.source_hash()) == same


@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, m=8),
        replace(PROBLEM, m=257),
        replace(PROBLEM, m=256, n=2120),
        replace(PROBLEM, n=577),
        replace(PROBLEM, k=7168 + 32),
        replace(PROBLEM, dtype="fp32", wdtype="fp32", out_dtype="fp32"),
        replace(PROBLEM, layout="nn"),
        replace(PROBLEM, threads=2),
    ],
    ids=str,
)
def test_it_offers_nothing_for_what_it_cannot_run_or_others_run_faster(problem: Problem) -> None:
    assert list(BACKEND.candidates(problem)) == []


def test_without_a_gpu_of_its_architecture_or_a_compiler_there_are_no_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(Cuda(device=replace(H200, arch="sm_80")).candidates(PROBLEM)) == []
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    assert list(BACKEND.candidates(PROBLEM)) == []
    assert catalog.candidates(replace(PROBLEM, layout="nn"), H200).get("triton", []) == []


@needs_compiler
def test_its_offers_need_nothing_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker imported Triton for them, though GEMMTUNED_WITHOUT named it."""
    asked: list[str] = []
    real = catalog.kernels
    monkeypatch.setattr(catalog, "kernels", lambda backend: asked.append(backend) or real(backend))
    assert Cuda(device=H200).offers(Problem(m=16, n=4096, k=4096))
    assert asked == ["cuda"]


@pytest.mark.parametrize(
    ("device", "n", "compiler", "tiles"),
    [
        (H200, 576, "13.0", 8),
        (H200, 577, "13.0", 14),
        (H200, 576, None, 14),
        (H200, 65536, "13.0", 14),
        (A100, 576, "13.0", 14),
    ],
)  # fmt: skip
def test_kernels_by_triton_keep_their_places_where_it_offers_nothing(
    monkeypatch: pytest.MonkeyPatch, device: Device, n: int, compiler: str | None, tiles: int
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(nvrtc, "version", lambda: compiler)
    assert len(catalog.candidates(replace(PROBLEM, n=n), device)["triton"]) == tiles


@needs_compiler
@pytest.mark.parametrize("m", [9, 16, 33, 64, 65, 130, 256])
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_what_it_offers_fits_the_device_and_fills_it(m: int, n: int, k: int) -> None:
    problem = Problem(m=m, n=n, k=k)

    found = [catalog.record_of(c, problem)[1] for c in BACKEND.candidates(problem)]

    assert len({(one.rows, one.parts, one.tokens) for one in found}) == len(found) <= (6 if m <= 16 else 8)
    too_small = ((n, k) in ((8, 64), (130, 4032)) and m <= 64) or (n, k) == (8, 64)  # for a whole device
    assert too_small or bool(found) == (m <= 64 or m * n <= 4096 * H200.units)
    for one in found:
        assert one.shared <= shared_limit("sm_90") and one.thread_blocks >= 0.6 * H200.units
        wide, high = one.grid
        assert one.rows * (wide // one.parts) >= n and one.tokens * high >= m > one.tokens * (high - 1)
        assert one.most * one.parts * 64 >= k and one.depth >= min(one.most, 4)


@pytest.mark.long
@pytest.mark.part(6)
@needs_compiler
@pytest.mark.parametrize("m", [16, 64, 256])
@pytest.mark.parametrize(("n", "k"), WEIGHTS[:11])
def test_what_it_offers_compiles_without_spills(n: int, k: int, m: int) -> None:
    problem = Problem(m=m, n=n, k=k)
    for candidate in list(BACKEND.candidates(problem))[:3]:
        made = one_shot.KERNEL.compile(catalog.record_of(candidate, problem)[1])
        assert made.data[:4] == b"\x7fELF" and made.spill_bytes == 0 and 0 < made.registers <= 255


@pytest.mark.part(5)
@needs_compiler
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "parts", "tokens"),
    [
        (64, 576, 7168, 40, 7, 64),
        (64, 2112, 7168, 56, 3, 64),
        (17, 256, 7168, 40, 16, 32),
        (48, 7168, 2048, 64, 1, 48),
        (1, 8, 64, 8, 1, 16),
        (256, 576, 7168, 88, 8, 128),
    ],
)
def test_what_it_publishes_is_a_launch_record_of_the_binary_that_is_measured(
    m: int, n: int, k: int, rows: int, parts: int, tokens: int, bias: bool, dtype: str
) -> None:
    problem = Problem(m=m, n=n, k=k, bias=bias, dtype=dtype, wdtype=dtype, out_dtype=dtype)
    candidate = Candidate.of("cuda", kernel="one_shot", rows=rows, parts=parts, tokens=tokens)

    text, data = BACKEND.launch_of(candidate, problem)

    facts = read_launch(text)
    assert isinstance(facts, KernelLaunch) and facts.text() == text
    assert facts.binary == sha256(data).hexdigest()
    assert facts.name == f"gemmtuned_one_shot_{n}x{k}_m{tokens}" and facts.name.encode() in data
    assert b"one_shot\0" not in data  # the name in the source
    given = ("x.ptr", "w.ptr", *(["bias.ptr"] if bias else []), "y.ptr", "x.size0", "x.stride0", "w.stride0")
    assert facts.arguments == given
    assert facts.cluster == parts and facts.at_most("x.size0") == m
    assert facts.grid == (("w.size0", rows), ("x.size0", tokens), ("", 1))
    assert facts.workspace_bytes == 0 and facts.threads == (256 if tokens > 64 else 128)
    facts.check_for(problem)


@pytest.mark.parametrize(
    ("changes", "config", "why"),
    [
        ({}, {"rows": 40, "parts": 17, "tokens": 64}, "parts is 17, expected an integer from 1 to 16"),
        ({}, {"rows": 42, "parts": 7, "tokens": 64}, "rows is 42, expected a multiple of 8 from 8 to 256"),
        ({}, {"rows": 264, "parts": 7, "tokens": 64}, "rows is 264"),
        ({}, {"rows": 0, "parts": 7, "tokens": 64}, "rows is 0"),
        ({}, {"rows": 40}, "expected parts, rows, tokens"),
        ({}, {"rows": 40, "parts": 7, "tokens": 40}, "tokens is 40, expected a multiple of 16 from 16 to 128"),
        ({}, {"rows": 40, "parts": 7, "tokens": 144}, "tokens is 144"),
        (
            {"m": 256, "n": 5120},
            {"rows": 256, "parts": 16, "tokens": 128},
            "256 rows and 128 tokens in 16 parts do not fit",
        ),
        ({"k": 64}, {"rows": 8, "parts": 2, "tokens": 64}, "2 parts"),
        ({"m": 257}, {"rows": 40, "parts": 7, "tokens": 64}, "M up to 256"),
        ({"n": 577}, {"rows": 40, "parts": 7, "tokens": 64}, "multiples of 2"),
        ({"k": 7200}, {"rows": 40, "parts": 7, "tokens": 64}, "multiples of 64"),
        ({"layout": "tn"}, {"rows": 40, "parts": 7, "tokens": 64}, "layout nt"),
        ({}, {"kernel": "two_shots", "rows": 40, "parts": 7}, "no kernel of ours"),
    ],
)
def test_configs_of_other_peoples_tables_are_refused_with_the_reason(
    changes: dict[str, object], config: dict[str, object], why: str
) -> None:
    problem = replace(PROBLEM, **changes)  # type: ignore[arg-type]
    candidate = Candidate("cuda", json.dumps({"kernel": "one_shot", **config}))
    assert not BACKEND.holds(candidate, problem)
    with pytest.raises(CandidateFailed, match=why):
        BACKEND.launch_of(candidate, problem)


def test_the_source_of_every_problem_is_its_own() -> None:
    one = one_shot.one_shot({"rows": 40, "parts": 7, "tokens": 64}, PROBLEM)
    texts = {
        replace(one, **change).source()  # type: ignore[arg-type]
        for change in (
            {},
            {"n": 640},
            {"k": 8192},
            {"rows": 48},
            {"parts": 8},
            {"bias": True},
            {"dtype": "fp16"},
            {"tokens": 48},
        )
    }
    assert len(texts) == 8 and not any("\nOF_THIS_TYPE\n" in text for text in texts)
    assert replace(one, m=63).source() == one.source()


@pytest.mark.long
@needs_compiler
def test_a_binary_is_compiled_once_and_never_read_from_where_others_could_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path))
    source = one_shot.one_shot({"rows": 8, "parts": 1, "tokens": 64}, Problem(m=64, n=8, k=64)).source()
    first = nvrtc.compiled(source, "sm_90a")
    (kept,) = cached()
    calls = []
    compiler = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *a: calls.append(1) or compiler(*a))
    assert nvrtc.compiled(source, "sm_90a") == first and not calls
    kept.chmod(0o666)
    assert nvrtc.compiled(source, "sm_90a") == first and len(calls) == 1
    assert not kept.stat().st_mode & 0o022
    kept.write_bytes(kept.read_bytes()[:-1])
    assert nvrtc.compiled(source, "sm_90a") == first and len(calls) == 2
    for count, text in enumerate(("not ours", "", "[]\n", "null\n", "{}\n"), 3):
        kept.write_text(text)
        assert nvrtc.compiled(source, "sm_90a") == first and len(calls) == count
        assert nvrtc.compiled(source, "sm_90a") == first and len(calls) == count
    other = one_shot.one_shot({"rows": 16, "parts": 1, "tokens": 64}, Problem(m=64, n=8, k=64)).source()
    nvrtc.compiled(other, "sm_90a")
    (second,) = set(cached()) - {kept}
    kept.write_bytes(second.read_bytes())  # another one's binary under this one's name
    assert nvrtc.compiled(source, "sm_90a") == first and len(calls) == count + 2
    kept.parent.chmod(0o777)
    assert nvrtc.compiled(source, "sm_90a") == first and len(calls) == count + 3


@needs_compiler
def test_the_cache_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "KEPT", 4)
    sources = [
        one_shot.one_shot({"rows": 8, "parts": 1, "tokens": 64}, Problem(m=64, n=n, k=64)).source()
        for n in range(8, 20, 2)
    ]
    for count, source in enumerate(sources):
        nvrtc.compiled(source, "sm_90a")
        os.utime(max(cached(), key=lambda path: path.stat().st_mtime), (count, count + 1e6))
    assert len(cached()) == 4
    monkeypatch.setattr(nvrtc, "_compile", None)  # the newest are there
    nvrtc.compiled(sources[-1], "sm_90a"), nvrtc.compiled(sources[-2], "sm_90a")


@needs_compiler
def test_where_nothing_can_be_kept_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path / "file"))
    source = one_shot.one_shot({"rows": 8, "parts": 1, "tokens": 64}, Problem(m=64, n=8, k=64)).source()
    assert nvrtc.compiled(source, "sm_90a").data[:4] == b"\x7fELF"


@needs_compiler
def test_the_compilers_objection_is_the_reason() -> None:
    with pytest.raises(CandidateFailed, match=r'does not compile for sm_90a: .*"nothing" is undefined'):
        nvrtc.compiled('extern "C" __global__ void f() { nothing(); }', "sm_90a")


class KeepsInMemory(one_shot.OneShot):
    """Its kernel picks from an array at run time, which registers cannot do."""

    def source(self) -> str:
        return """extern "C" __global__ void f(int* p, int n) {
            int a[64];
            for (int i = 0; i < 64; i++) a[i] = p[i];
            for (int i = 0; i < n; i++) a[p[i] & 63] += i;
            p[0] = a[n & 63];
        }"""


@needs_compiler
def test_what_keeps_values_in_memory_is_refused() -> None:
    with pytest.raises(CandidateFailed, match="spills 256 bytes per thread"):
        one_shot.KERNEL.compile(KeepsInMemory(64, 576, 7168, False, "bf16", 40, 7, 64))


def packages(folder: Path, *versions: str) -> None:
    """What their wheels unpack, as far as names go."""
    for version in versions:
        major = version.split(".")[0]
        place = folder / "nvidia" / ("cuda_nvrtc" if major == "12" else f"cu{major}") / "lib"
        place.mkdir(parents=True, exist_ok=True)
        for name in (f"libnvrtc.so.{major}", f"libnvrtc-builtins.so.{version}", f"libnvrtc-builtins.alt.so.{version}"):
            (place / name).touch()


@pytest.fixture
def found_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder to look in for the compiler, and nowhere else."""
    kept = (nvrtc.version, nvrtc._installed, nvrtc.library)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not list(Path(p).glob("nvidia/cu*")))])
    monkeypatch.setattr(nvrtc, "_SYSTEM", ())
    for function in kept:
        function.cache_clear()
    yield tmp_path
    for function in kept:
        function.cache_clear()


@pytest.mark.parametrize(
    ("versions", "taken"),
    [((), None), (("12.0",), None), (("12.8",), "12.8"), (("13.0",), "13.0"), (("13.0", "12.6"), "12.6")],
)
def test_the_oldest_compiler_that_will_do_is_taken_and_its_version_read_without_loading_it(
    found_anew: Path, versions: tuple[str, ...], taken: str | None
) -> None:
    packages(found_anew, *versions)
    assert nvrtc.version() == taken


def test_a_compiler_that_does_not_load_is_named_with_its_place(found_anew: Path) -> None:
    packages(found_anew, "13.0")
    with pytest.raises(
        CandidateFailed, match=rf"NVRTC 13.0 does not load \({found_anew}/nvidia/cu13/lib/libnvrtc.so.13\)"
    ):
        nvrtc.compiled("", "sm_90a")


def test_its_own_cache_is_switched_off_where_it_has_one() -> None:
    assert [of for of in ("12.1", "12.8", "12.9", "13.0") if "--no-cache" in nvrtc._options(of)] == ["12.9", "13.0"]


def test_without_a_compiler_it_says_where_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    with pytest.raises(CandidateFailed, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compiled("", "sm_90a")


@needs_compiler
def test_the_processes_that_compile_leave_it_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path))
    candidate = Candidate.of("cuda", kernel="one_shot", rows=40, parts=7, tokens=64)
    assert compile_one(candidate, PROBLEM, H200) == ""
    assert len(cached()) == 1
    assert "multiples of 64" in compile_one(candidate, replace(PROBLEM, k=100), H200)
    assert compile_one(Candidate("torch"), PROBLEM, H200) == ""


@pytest.mark.long
def test_offering_and_compiling_need_no_torch() -> None:
    code = (
        "import sys\nfrom gemmtuned.kernels import catalog\nfrom gemmtuned.configs.problem import Problem\n"
        "from gemmtuned.configs.solution import Device\n"
        f"d = Device(*{('cuda-nvidia-h200-132', 'cuda', 'NVIDIA H200', 'sm_90', 132)})\n"
        "p = Problem(m=64, n=576, k=7168)\nfound = catalog.candidates(p, d)\nprint(*[b for b in found if found[b]])\n"
        "from gemmtuned.kernels.compile_candidate import compile_candidate\n"
        "for some in found.values():\n"
        "    for one in some[:1]: compile_candidate(one, p, d)\n"
        "assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("cuda" in done.stdout) == (nvrtc.version() is not None)
