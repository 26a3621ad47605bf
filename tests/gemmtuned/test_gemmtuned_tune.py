"""`gemmtuned tune` as a user of AITER's tuners types it: its flags, the files it writes, an interrupt on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from store_cases import found, saw

from gemmtuned.cli import build
from gemmtuned.commands import tune
from gemmtuned.commands.aiter_flags import NO_EFFECT, translate
from gemmtuned.commands.tune import _report as tune_report
from gemmtuned.commands.tune_options import libraries
from gemmtuned.commands.tune_sources import Wanted
from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import problem_of, solution_of
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Device, Environment, Solution, cpu_device
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.daemon.device.devices import CpuMonitor, find_monitors
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.service.main import UNTRIED, Tuned
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.hooks.dispatch import NATIVE_CODES
from gemmtuned.reports.chosen import of_table
from gemmtuned.reports.progress import Left
from gemmtuned.reports.render import show
from gemmtuned.reports.tuned_files import TunedTable

DATA = Path(__file__).parents[1] / "data"
PROBLEM = Problem(m=8, n=64, k=64, dtype="fp32", threads=1)
SHAPES = "M,N,K\n" + "".join(f"{m},{n},256\n" for n in (128, 256) for m in (1, 4, 8, 17))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def typed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Request, dict[str, Any]]]:
    """What a command line asks of the tuner, which is not run."""
    asked: list[tuple[Request, dict[str, Any]]] = []

    def tune_now(request: Request, settings: Settings, **how: Any) -> Tuned:
        asked.append((request, how))
        return Tuned()

    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", tune_now)

    def run(*args: str) -> tuple[Request, dict[str, Any]]:
        with pytest.raises(SystemExit) as end:
            build()(["tune", *args], prog_name="gemmtuned")
        assert end.value.code == 0
        return asked[-1]

    return run


def test_it_says_when_others_used_the_device_meanwhile(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for share, words in ((0.8, "others used up to 80%"), (0.05, "")):
        monkeypatch.setattr(
            "gemmtuned.daemon.service.main.tune_now", lambda *a, share=share, **how: Tuned(others=share)
        )
        with pytest.raises(SystemExit):
            build()(["tune", "fp32:8x64x64"], prog_name="gemmtuned")
        told = capsys.readouterr().out
        assert (words or "0 of 1") in told and ("others used" in told) == bool(words)
        assert "again" not in told, "nothing was measured"
    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", lambda *a, **how: Tuned(others=0.8, crowded=3))
    with pytest.raises(SystemExit):
        build()(["tune", "fp32:8x64x64"], prog_name="gemmtuned")
    assert "a daemon that finds it so measures 3 of them again" in capsys.readouterr().out


@pytest.mark.parametrize(("failed", "code"), [({}, 75), ({PROBLEM: "it crashed"}, 1)])
def test_what_was_put_off_is_told_with_the_way_out_and_its_own_code(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failed: dict[Problem, str],
    code: int,
) -> None:
    later = replace(PROBLEM, n=128)
    done = Tuned(failed=failed, put_off={later: "the CPU is in use"})
    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", lambda *a, **how: done)
    with pytest.raises(SystemExit) as end:
        build()(["tune", str(PROBLEM), str(later)], prog_name="gemmtuned")

    told = capsys.readouterr().out
    assert end.value.code == code
    assert "put off: the CPU is in use" in told and "1 put off" in told and "--idle" in told


def test_a_reason_to_put_off_is_told_once_for_all_that_share_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = [replace(PROBLEM, n=n) for n in (32, 48, 128)]
    reasons = [f"others use the CPU: our threads waited for it {share}% of the time" for share in (71, 83)]
    done = Tuned(put_off=dict(zip(later, [*reasons, "the disk is full"], strict=True)))
    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", lambda *a, **how: done)
    with pytest.raises(SystemExit):
        build()(["tune", *map(str, later)], prog_name="gemmtuned")
    told = capsys.readouterr().out
    with pytest.raises(SystemExit):
        build()(["tune", *map(str, later), "--json"], prog_name="gemmtuned")
    rows = json.loads(capsys.readouterr().out)["rows"]

    assert told.count("others use the CPU") == 1 and f"2 put off: {reasons[0]}" in told
    assert "1 put off: the disk is full" in told
    assert [row["why"] for row in rows] == [f"put off: {why}" for why in (*reasons, "the disk is full")]


def test_how_long_the_rest_may_take_goes_by_what_is_done() -> None:
    now = [0.0]
    left = Left(lambda: now[0])

    assert left(2, 10) == ""  # what was done before is nobody's pace
    now[0] = 6.0
    assert left(4, 10) == "about 18.0 s left, "
    now[0] = 7.0
    assert left(4, 10) == "about 17.0 s left, "
    now[0] = 60.0
    assert left(4, 10) == "about 16.5 s left, ", "one that takes long: it stands still, and counts up no second"
    assert left(5, 10) == "about 100 s left, "
    assert left(10, 10) == ""


def run(*args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmtuned", "tune", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **how)


# --- flags


def test_aiter_spellings_are_ours() -> None:
    args = "--untune_file u.csv --tuned_file t.csv -o2 p.csv --errRatio 0.1 --input-type bf16 --num_iters=20 --all"
    ours = "--input u.csv --output t.csv -o2 p.csv --err-ratio 0.1 --dtype bf16 --iters=20 --all"

    assert translate(args.split()) == (ours.split(), [])
    assert translate(["--run_config", "t.csv", "--run_config", "-v"])[0] == [
        "--run-config=t.csv",
        "--run-config=",
        "-v",
    ]
    assert translate(["--", "--batch", "3"]) == (["--", "--batch", "3"], [])


@pytest.mark.parametrize("flag", NO_EFFECT)
def test_a_flag_without_effect_is_taken_with_its_values_and_says_why(flag: str) -> None:
    values = ["7"] * NO_EFFECT[flag][0]

    for spelled in {flag, flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag}:
        args, said = translate([spelled, *values, "bf16:8x8x8"])
        assert args == ["bf16:8x8x8"]
        assert said == [f"{spelled} has no effect: {NO_EFFECT[flag][1]}"]


def test_the_flags_of_the_search_reach_the_request(typed: Callable[..., tuple[Request, dict[str, Any]]]) -> None:
    request, how = typed(
        "fp32:8x64x64,threads=1", "--iters", "40", "--warmup", "9", "--timeout", "30", "--errRatio", "0.01", "--atol",
        "0.1", "--rtol", "0.2", "--libtype", "triton,onednn", "--space", "BLOCK_SIZE_N=8,16", "--space", "num_warps=4",
        "--min_improvement_pct", "5", "--all", "--mp", "1", "--idle",
    )  # fmt: skip

    options = request.options
    assert (options.iters, options.warmup, options.err_ratio) == (40, 9, 0.01)
    assert (options.atol, options.rtol, options.min_gain) == (0.1, 0.2, 1.05)
    assert options.backends == ("triton", "onednn")
    assert options.space == {"rows": (8, 16), "warps": (4,)}
    assert (request.again, request.timeout_s, how["idle"], len(how["monitors"])) == (True, 30.0, True, 1)


def test_a_tolerance_alone_lets_no_element_be_outside(typed: Callable[..., tuple[Request, dict[str, Any]]]) -> None:
    assert typed("fp32:8x64x64", "--atol", "0.01")[0].options.err_ratio == 0.0
    assert typed("fp32:8x64x64")[0].options.err_ratio is None


def test_libraries_without_a_backend_here_are_named(
    typed: Callable[..., tuple[Request, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    request, _ = typed("fp32:8x64x64", "--libtype", "asm,triton", "--space", "waves_per_eu=3")

    assert request.options.backends == ("triton",)
    said = capsys.readouterr().err
    assert "--libtype asm: no such backend" in said and "--space waves_per_eu has no effect" in said
    assert typed("fp32:8x64x64", "--libtype", "all")[0].options.backends is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--space", "num_warps=3x"], "'3x' is not a whole number"),
        (["--space", "num_warps=4,,8"], "'' is not a whole number"),
        (["--indtype", "fp8"], "name the problem, such as scaled:fp8_e4m3>bf16:8x4096x7168,scale=row"),
        (["--outdtype", "fp8"], "name the problem, such as scaled:fp8_e4m3>bf16:8x4096x7168,scale=row"),
    ],
)
def test_values_that_cannot_be_are_refused(
    args: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        build()(["tune", "fp32:8x64x64", *args, "--dry-run"], prog_name="gemmtuned")

    assert end.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


# --- where problems come from


def test_without_shapes_those_of_the_atomic_guide_are_taken(
    typed: Callable[..., tuple[Request, dict[str, Any]]],
) -> None:
    request, _ = typed("--threads", "2")
    assert len(request.problems) == 40
    assert {(p.n, p.k) for p in request.problems} == {
        (1024, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072),
    }  # fmt: skip
    assert {p.m for p in request.problems} == {16, 32, 64, 128, 256, 512, 2048, 4096}

    request, _ = typed("--batch-size", "512", "--input-type", "bfloat16", "--out-dtype", "float32", "--threads", "2")
    assert {(p.m, p.dtype, p.out_dtype) for p in request.problems} == {(512, "bf16", "fp32")}


def test_without_shapes_what_waits_here_goes_before_the_built_in_ones(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (known,) = {monitor.device.key for monitor in find_monitors() if monitor.device.kind == "cpu"}
    here, elsewhere = (
        Environment(replace(cpu_device(), key=key), {"torch": "1"}) for key in (known, "cpu-of-another-machine")
    )
    cheap, dear, solved = (replace(PROBLEM, k=k) for k in (64, 4096, 96))
    settings = Settings.from_env(dict(os.environ))
    store = Store(settings.db, locks=settings.locks)
    now_s = time.time()
    store.sightings.add("r", here, [saw(cheap), saw(dear), saw(solved)], now_s=now_s)
    store.sightings.add("r", elsewhere, [saw(replace(PROBLEM, k=32))], now_s=now_s)
    work = store.leases.lease_next("a:1", here, now_s=now_s, hold_s=60, problems=[solved])
    assert work is not None
    store.solutions.install(work, [found(solved, here, backend="torch")], environment=here, now_s=now_s)
    small = [replace(PROBLEM, m=m, n=96) for m in (1, 2, 3, 4)]  # with a verdict for M = 16, that nobody called
    store.sightings.add("r", here, [saw(p) for p in small], now_s=now_s)
    work = store.leases.lease_next("a:1", here, now_s=now_s, hold_s=60, problems=small[:1])
    assert work is not None and work.covers == "fine" and work.problem.m == 16
    store.solutions.install(
        work, [found(work.problem, here, backend="torch", covers="fine")], environment=here, now_s=now_s
    )
    hopeless = replace(PROBLEM, k=128)
    store.sightings.add("r", here, [saw(hopeless)], now_s=now_s)
    for attempt in range(3):
        then_s = now_s + attempt * 86_400
        work = store.leases.lease_next("a:1", here, now_s=then_s, hold_s=60, problems=[hopeless])
        assert work is not None
        store.leases.fail(work, "it crashed", now_s=then_s)
    store.close()

    assert typed()[0].problems == [dear, cheap]
    assert set(typed("--all")[0].problems) == {dear, cheap, solved, hopeless, *small}
    for option, there in (
        (("--dtype", "bf16"), "dtype fp32 were"),
        (("--threads", "2"), "threads 1 were"),
        (("--dtype", "bf16", "--threads", "1", "-o", "bf16_tuned_gemm.csv"), "dtype fp32; threads 1 were"),
        (("--out-dtype", "bf16", "--all"), "out-dtype fp32 were"),
    ):
        with pytest.raises(SystemExit) as end:
            build()(["tune", *option], prog_name="gemmtuned")
        told = capsys.readouterr().out
        assert end.value.code == 1 and f"was ever called here ({there}; " in told and "0 to tune" in told
    assert not (home / "bf16_tuned_gemm.csv").exists()
    store = Store(settings.db, locks=settings.locks)
    half = replace(PROBLEM, dtype="bf16", wdtype="bf16", out_dtype="bf16", m=3)
    never, two = replace(half, out_dtype="fp32", m=5), replace(PROBLEM, threads=2, m=7)  # torch has it on GPUs alone
    mixed = replace(never, family="scaled", dtype="i8", wdtype="i8", scale="row", wscale="row")
    store.sightings.add("r", here, [saw(p) for p in (half, never, mixed, two)], now_s=now_s)
    store.close()
    assert typed("--dtype", "bf16")[0].problems == [half]
    assert typed("--threads", "2")[0].problems == [two]
    assert set(typed("--threads", "1")[0].problems) == {dear, cheap, half, mixed}
    assert typed("--dtype", "i8", "--out-dtype", "fp32")[0].problems == [mixed]
    assert set(typed("--dtype", "fp32", "--threads", "1")[0].problems) == {dear, cheap}


def test_a_dry_run_says_how_many_have_a_verdict_that_stands(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (known,) = {monitor.device.key for monitor in find_monitors() if monitor.device.kind == "cpu"}
    here = Environment(replace(cpu_device(), key=known), {"torch": "1"})
    settings = Settings.from_env(dict(os.environ))
    store = Store(settings.db, locks=settings.locks)
    small = [replace(PROBLEM, m=m, n=96) for m in (1, 2, 3, 4)]
    covered, other = small[2], replace(PROBLEM, k=32)
    store.sightings.add("r", here, [saw(p) for p in (PROBLEM, other, *small)], now_s=time.time())
    for p, covers in ((PROBLEM, "exact"), (covered, "fine")):
        work = store.leases.lease_next("a:1", here, now_s=time.time(), hold_s=60, problems=[p])
        assert work is not None and work.covers == covers
        verdict = found(work.problem, here, backend="torch", covers=covers)
        store.solutions.install(work, [verdict], environment=here, now_s=time.time())
    store.close()

    def planned(*more: str) -> str:
        with pytest.raises(SystemExit):
            build()(["tune", *map(str, (PROBLEM, other, covered)), "--dry-run", *more], prog_name="gemmtuned")
        return capsys.readouterr().out

    assert "3 to tune" in planned() and "; 2 of them have a verdict, measured again with --all or other" in planned()
    assert "have a verdict" not in planned("--all")


def test_what_is_named_and_was_never_called_is_said_beside_what_was(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("fp32:8x64x64,threads=1")[0] and capsys.readouterr().err == "", "without a database nothing is said"
    (known,) = {monitor.device.key for monitor in find_monitors() if monitor.device.kind == "cpu"}
    here = Environment(replace(cpu_device(), key=known), {"torch": "1"})
    settings = Settings.from_env(dict(os.environ))
    store = Store(settings.db, locks=settings.locks)
    biased = [replace(PROBLEM, bias=True, threads=threads) for threads in (1, 2, 3, 4)]
    store.sightings.add("r", here, [saw(one) for one in biased], now_s=time.time())
    store.close()
    m, n, k = PROBLEM.m, PROBLEM.n, PROBLEM.k

    def said(*words: str) -> list[str]:
        capsys.readouterr()
        assert typed(*words)[0].problems
        return capsys.readouterr().err.splitlines()

    assert said(str(biased[0])) == said(f"{m}x{n}x{k}") == said(str(m), str(n), str(k)) == []
    (line,) = said(str(PROBLEM))
    assert line.startswith(f"gemmtuned: {PROBLEM} was never called here, but {biased[0]}, ")
    assert line.endswith(" and 1 more are known")
    (line,) = said(f"{m}x{n}x{k + 1}", "--threads", "1")
    assert line == (
        f"gemmtuned: bf16:{m}x{n}x{k + 1},threads=1 was never called here, nor was anything of this M, N and K: it is "
        "tuned as it is named"
    )
    assert said(*(f"fp32:{m}x{n}x{k},threads={threads}" for threads in range(5, 12)))[-1] == (
        "gemmtuned: 4 more of those named were never called here"
    )


def test_what_of_a_kind_has_been_tried_is_not_tried_again(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (known,) = {monitor.device.key for monitor in find_monitors() if monitor.device.kind == "cpu"}
    here = Environment(replace(cpu_device(), key=known), {"torch": "1"})
    settings = Settings.from_env(dict(os.environ))
    store = Store(settings.db, locks=settings.locks)
    now_s = time.time()
    half = replace(PROBLEM, dtype="bf16", wdtype="bf16", out_dtype="bf16", m=3)
    store.sightings.add("r", here, [saw(PROBLEM), saw(half)], now_s=now_s)
    work = store.leases.lease_next("a:1", here, now_s=now_s, hold_s=60, problems=[half])
    assert work is not None
    store.solutions.install(work, [found(half, here, backend="torch")], environment=here, now_s=now_s)
    store.close()

    for more in ((), ("--json",), ("--threads", str(half.threads))):
        with pytest.raises(SystemExit) as end:
            build()(["tune", "--dtype", "bf16", *more], prog_name="gemmtuned")
        told = capsys.readouterr().out
        assert (
            end.value.code == 0 and "the one problem of dtype bf16" in told and "called here has been tried: " in told
        )
    assert typed("--dtype", "bf16", "--all")[0].problems == [half]
    assert typed()[0].problems == [PROBLEM]


def test_a_model_of_which_nothing_can_be_tuned_is_listed_with_the_reasons(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = home / "my-model-NVFP4"
    model.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **sizes}))
    for more, code in ((["--dry-run"], 0), ([], 1)):
        with pytest.raises(SystemExit) as end:
            build()(["tune", "--model-dir", str(model), *more], prog_name="gemmtuned")
        told = capsys.readouterr().out
        assert end.value.code == code
        assert "left out: how its weights are quantised is not understood" in told
        assert "the model's name says NVFP4" in told and "0 to tune" in told


@pytest.mark.parametrize("more", [(), ("--dtype", "fp16")])
def test_a_model_that_tells_no_dtype_is_planned_in_one_that_is_named(
    more: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "model").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (home / "model/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **sizes}))

    with pytest.raises(SystemExit):
        build()(["tune", "--model-dir", "model", "--nsets", "1", "--dry-run", *more], prog_name="gemmtuned")

    noted = "config.json tells no dtype: taken as bf16, --dtype says another" in capsys.readouterr().out
    assert noted is not bool(more)


def test_a_shape_alone_is_what_was_seen_of_it_here_and_else_one_by_default(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path
) -> None:
    assert typed("8", "64", "96", "--threads", "2")[0].problems == [Problem(m=8, n=64, k=96, dtype="bf16", threads=2)]

    settings = Settings.from_env(dict(os.environ))
    store = Store(settings.db, locks=settings.locks)
    other = replace(PROBLEM, dtype="fp16", wdtype="fp16", out_dtype="fp16", threads=2)
    environment = Environment(cpu_device(), {"torch": "1"})
    store.sightings.add("r", environment, [saw(PROBLEM), saw(other), saw(replace(PROBLEM, m=9))], now_s=time.time())
    queued = replace(PROBLEM, m=6)  # and never called
    assert store.leases.lease_next("a:1", environment, now_s=time.time(), hold_s=60, problems=[queued])
    store.close()

    assert typed("6x64x64")[0].problems == [queued]
    assert set(typed("8", "64", "64")[0].problems) == set(typed("8x64x64")[0].problems) == {PROBLEM, other}
    assert typed("8", "64", "64", "--dtype", "fp16", "fp32:7x64x64,threads=1")[0].problems == [
        other, replace(PROBLEM, m=7),
    ]  # fmt: skip
    assert set(typed("6x64x64", "--all-bias")[0].problems) == {queued, replace(queued, bias=True)}
    assert [p.dtype for p in typed("8x64x64", "--threads", "3", "--dtype", "fp32")[0].problems] == ["fp32"]


def test_problems_that_name_no_threads_take_the_default(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path
) -> None:
    (home / "list").write_text("fp32:8x64x64\nfp32:9x64x64,threads=1\n")

    request, _ = typed("fp32:7x64x64", "-i", "list", "--threads", "3")
    assert [(p.m, p.threads) for p in request.problems] == [(7, 3), (8, 3), (9, 1)]
    assert [p.threads for p in typed("fp32:7x64x64", "--threads", "0")[0].problems] == [0]


def gpu_monitor() -> Any:
    return SimpleNamespace(id="GPU-1", name="cuda:0", device=Device("cuda-x-132", "cuda", "X", "sm_90", 132))


def test_on_a_gpu_shapes_have_the_math_mode_that_programs_call_them_with_by_torchs_defaults(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmtuned.daemon.device.devices.find_monitors", lambda: [CpuMonitor(), gpu_monitor()])
    (home / "u.csv").write_text("M,N,K,dtype\n8,64,64,torch.bfloat16\n8,64,64,torch.float32\n")
    (home / "list").write_text("fp16:8x64x64\nbf16:9x64x64,math=ieee\n")
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64,
              "num_hidden_layers": 1, "vocab_size": 64}  # fmt: skip
    (home / "config.json").write_text(json.dumps(config))

    def modes(*args: str) -> set[tuple[str, str]]:
        return {(p.dtype, p.math_mode) for p in typed(*args)[0].problems}

    assert modes("-i", "u.csv") == {("bf16", "reduced"), ("fp32", "ieee")}
    assert modes("--model-dir", ".", "--nsets", "1") == modes() == {("bf16", "reduced")}
    assert modes("bf16:7x64x64", "-i", "list") == {("bf16", "reduced"), ("fp16", "reduced"), ("bf16", "ieee")}
    assert modes("bf16:7x64x64,math=ieee") == {("bf16", "ieee")}
    assert modes("bf16:7x64x64,threads=2") == modes("bf16:7x64x64", "--threads", "2") == {("bf16", "ieee")}


def test_a_table_is_looked_up_whatever_math_mode_and_threads_a_problem_has(home: Path) -> None:
    (home / "t.csv").write_text(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName\n"
        "sm_90,132,16,64,64,False,torch.bfloat16,torch.bfloat16,False,False,triton,0,0,9.5,k\n"
    )
    on_gpu, on_cpu = Problem(m=16, n=64, k=64, math_mode="reduced"), Problem(m=9, n=64, k=64, threads=2)

    chosen = of_table(home / "t.csv", [on_gpu, on_cpu], dtype="bf16")

    assert [(problem, candidate.backend) for problem, candidate in chosen] == [(on_gpu, "triton"), (on_cpu, "triton")]


def test_all_bias_asks_for_both_kinds(typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path) -> None:
    (home / "u.csv").write_text("M,N,K\n8,64,64\n")

    request, _ = typed("-i", "u.csv", "--all_bias", "--threads", "2")
    assert [(p.m, p.bias) for p in request.problems] == [(8, False), (8, True)]


def test_a_model_folder_gives_its_shapes_and_says_why(
    typed: Callable[..., tuple[Request, dict[str, Any]]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (home / "config.json").write_text(json.dumps(config))

    request, _ = typed("--model_dir", ".", "--tp", "2", "--nsets", "1,4", "--batch_size", "8", "--threads", "2")

    assert {p.m for p in request.problems} == {8, 32}
    assert (8, 2048, 1024) in {(p.m, p.n, p.k) for p in request.problems}  # (16 + 2 * 8) / 2 heads of 128
    assert {p.dtype for p in request.problems} == {"bf16"}
    out = capsys.readouterr().out
    assert "qkv_proj" in out and "1024 q_proj + 512 k_proj + 512 v_proj" in out


def test_a_list_like_live_traffic_is_planned_by_its_padded_keys(home: Path) -> None:
    table = next(DATA.rglob("glm47_bf16_untuned_gemm.csv"))

    done = run("-i", str(table), "--dry-run", "--json")

    planned = json.loads(done.stdout)
    assert (planned["exact_keys"], planned["fine_keys"], planned["coarse_keys"]) == (1321, 70, 16)
    assert len(planned["rows"]) == 1321
    assert 70 <= planned["units"] < 100  # a few buckets hold three sizes or less, which stand for themselves


def test_problems_go_to_the_device_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtuned.commands.tune import _shares

    class Monitor:
        def __init__(self, kind: str) -> None:
            self.device = Device(key=kind, kind=kind, name=kind, arch="", units=1)

    cpu, gpus = Monitor("cpu"), [Monitor("cuda"), Monitor("cuda")]
    on_cpu, on_gpu = Problem(m=1, n=8, k=8, threads=2), Problem(m=1, n=8, k=8)

    assert _shares([cpu, *gpus], [on_gpu, on_cpu], None) == [(gpus, [on_gpu]), ([cpu], [on_cpu])]
    assert _shares([cpu, *gpus], [on_gpu], 1) == [(gpus[:1], [on_gpu])]
    assert _shares([cpu], [on_gpu, on_cpu], None) == [([cpu], [on_gpu, on_cpu])]


@pytest.mark.parametrize("flag", ["-o", "-o2"])
def test_a_table_that_cannot_be_written_is_told_before_anything_is_tuned(
    flag: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", None)
    for file in ("nowhere/t.csv", "home.csv/t.csv"):
        (home / "home.csv").touch()
        with pytest.raises(SystemExit) as end:
            build()(["tune", "fp32:8x64x64", flag, file], prog_name="gemmtuned")

        assert end.value.code == 1
        assert f"{file}: cannot be written" in capsys.readouterr().err
    assert sorted(home.iterdir()) == [home / "home.csv"]


def test_what_cannot_be_read_is_named_and_no_traceback(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = home / "deep"
    deep.mkdir()
    (deep / "config.json").write_text('{"a":' * 100_000)
    for args, said in (
        (("--run_config", "nofile.csv"), "nofile.csv: cannot be read"),
        (("--run_config", "-o", "nofile.csv"), "nofile.csv: cannot be read"),
        (("bf16:8x8x8", "--run_config", "nofile.csv"), "nofile.csv: cannot be read"),
        (("--model-dir", "deep"), "deep/config.json: not a model's config.json"),
    ):
        with pytest.raises(SystemExit) as end:
            build()(["tune", *args], prog_name="gemmtuned")
        assert end.value.code in (1, 2) and said in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--batch", "--all"], ["--blockPerCu", "-v"], ["--batch"], ["--batch", "bf16:8x8x8"]])
def test_a_flag_of_aiters_does_not_take_the_next_one_for_its_value(
    args: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        build()(["tune", *args], prog_name="gemmtuned")

    assert end.value.code == 2 and f"{args[0]} needs a number" in capsys.readouterr().err


BF16 = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio"
KEY = "512,512,False,torch.bfloat16,torch.bfloat16,False,False"


def made(m: int, device: Device) -> Solution:
    return Solution(
        problem=Problem(m=m, n=512, k=512, math_mode="reduced"), device=device.key, mode="eager", covers="exact",
        backend="triton", config='{"kernel":"tiles"}', stamp="1", us=5.0, baseline_us=9.0, gain_low=1.5, err=1e-3,
        baseline_err=1e-3, state="published",
    )  # fmt: skip


def test_rows_of_others_stay_as_they_are_shapes_twice_and_cells_beyond_the_header_too(home: Path) -> None:
    device = Device("cuda-x-132", "cuda", "X", "sm_90", 132)
    theirs = [
        f"gfx942,304,16,{KEY},asm,7,2,3.5,fast,0.0",
        f"gfx942,304,16,{KEY},asm,8,2,9.5,slow,0.0,beyond",
        f"sm_90,132,8,{KEY},asm,8,2,9.5,old,0.0",
        f"sm_90,132,8,{KEY},asm,9,2,8.5,older,0.0",
        f"sm_90,132,9,{KEY},asm,9",
    ]
    (home / "t.csv").write_text("\n".join([BF16, *theirs]) + "\n")
    table = TunedTable(home / "t.csv", FAMILIES["bf16"])

    assert table.holds(made(8, device), device) and not table.holds(made(1, device), device)
    table.add(made(8, device), device)
    table.add(made(1, device), device)
    table.write()

    header, *lines = (home / "t.csv").read_text().splitlines()
    assert header == f"{BF16},tflops,bw,gemmtuned"
    assert (lines[0], lines[1], lines[3]) == (theirs[0], theirs[1].replace(",beyond", ",,,,beyond"), theirs[4])
    rows = read_file(home / "t.csv", ignore=("*",)).rows
    assert [(row["M"], row["libtype"]) for row in rows] == [
        ("16", "asm"), ("16", "asm"), ("8", "triton"), ("9", "asm"), ("1", "triton"),
    ]  # fmt: skip
    assert rows[1].values["+1"] == "beyond" and rows[1]["gemmtuned"] == ""
    again = TunedTable(home / "t.csv", FAMILIES["bf16"], sort=True)
    again.write()
    assert sorted((home / "t.csv").read_text().splitlines()) == sorted([header, *lines])


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a8w8_tuned_gemm.csv", "gfx,cu_num,M,N,K,q_dtype_w,kernelId,splitK,us,kernelName,tflops,bw,errRatio"),
        ("mine.csv", "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"),
        ("guide.csv", "M,N,K,lib,kernel_name,tflops,bandwidth_gb_s"),
    ],
)
def test_another_familys_table_is_not_written_to(
    name: str, header: str, typed: Callable[..., Any], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / name).write_text(header + "\n")
    with pytest.raises(SystemExit) as end:
        build()(["tune", "bf16:8x64x64", "-o", name], prog_name="gemmtuned")

    assert (end.value.code, (home / name).read_text()) == (1, header + "\n")
    assert name in capsys.readouterr().err


def test_a_table_of_single_products_gets_no_name_of_batched_ones(home: Path) -> None:
    """Rows of a batched 8-bit table are tuned as products by themselves; nobody could read them under its name."""
    with pytest.raises(TableError, match=r"batched_a8w8.*the rows to be written are of a8w8.*a8w8_tuned_gemm\.csv"):
        TunedTable(home / "a8w8_tuned_batched_gemm.csv", FAMILIES["a8w8"])
    TunedTable(home / "bf16_tuned_batched_gemm.csv", FAMILIES["batched_bf16"])
    TunedTable(home / "bf16_tuned_batched_gemm.csv", FAMILIES["bf16"])  # whose header tells it, whatever the name


def test_what_is_of_another_table_than_the_first_is_said_so(home: Path) -> None:
    """AITER has columns for it: a shuffled weight with many rows is tuned as a plain one."""
    device = Device("cuda-x-132", "cuda", "X", "sm_90", 132)
    shuffled = Problem.parse("scaled:fp8_e4m3>bf16:16x512x128,scale=row,weight=shuffled")
    plain = Problem.parse("scaled:fp8_e4m3>bf16:2048x512x128,scale=row")
    files = tune._Files(home / "a8w8_bpreshuffle_tuned_gemm.csv", None, [shuffled, plain], sort=False)
    for problem in (shuffled, plain):
        files.found([replace(made(16, device), problem=problem)], device)
    assert files.notes == [f"1 has no place in that table, for example {plain}: it is of AITER's family a8w8"]
    odd = replace(shuffled, bias=True)
    files.found([replace(made(16, device), problem=odd)], device)
    (note,) = files.notes
    assert note.startswith("2 have no place in that table")


# --- runs


@pytest.mark.long
@pytest.mark.usefixtures("beside_others")
def test_a_run_writes_aiters_tables_and_leaves_what_others_wrote(home: Path) -> None:
    (home / "u.csv").write_text(
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n8,256,128,False,torch.float32,,False,False\n"
    )
    (home / "t.csv").write_text(
        "cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw,note\n"
        "304,16,512,512,False,torch.bfloat16,torch.bfloat16,False,False,asm,7,2,9.5,k,0.0,1.0,2.0,mine\n"
    )

    done = run(
        "-i", "u.csv", "-o", "t.csv", "-o2", "p.csv", "--threads", "1", "--batch", "50", "--iters", "12", "--json"
    )

    assert done.returncode == 0, done.stderr
    assert "--batch has no effect" in done.stderr
    problem = Problem(m=8, n=256, k=128, dtype="fp32", threads=1)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["problem"] == str(problem) and "before" not in row["why"]
    theirs, ours = read_file(home / "t.csv").rows
    assert (theirs["libtype"], theirs["us"], theirs["note"], theirs["cu_num"]) == ("asm", "9.5", "mine", "304")
    solution = solution_of(ours)
    assert solution is not None and solution.problem == problem
    assert float(ours["us"]) == pytest.approx(row["us"], abs=1e-4)
    profile = read_file(home / "p.csv")
    assert {r["libtype"] for r in profile.rows} >= {"torch", "torch_swap", "onednn"}
    assert all(problem_of(r) == Problem(m=8, n=256, k=128, dtype="fp32") for r in profile.rows)
    assert all(float(r["us"]) > 0 for r in profile.rows if r["outcome"] in ("ok", "slower"))

    checked = run("-i", "u.csv", "--run_config", "t.csv", "--threads", "1", "--json")
    assert checked.returncode == 0, checked.stderr
    (row,) = json.loads(checked.stdout)["rows"]
    assert row["route"] == ours["libtype"] and row["state"] in ("faster", "no faster", "default")

    again = run("-i", "u.csv", "--threads", "1")
    assert again.returncode == 0, again.stderr
    assert "measured before" in again.stdout
    assert "1 of 1 have a verdict, 1 from before (--all measures them again)" in again.stdout


@pytest.mark.parametrize("size", [2, 40])
def test_an_interrupt_names_few_that_were_not_tried_and_counts_many(
    size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [Problem(m=m, n=64, k=64, dtype="fp32", threads=1) for m in range(1, size + 2)]
    failed = {problems[0]: "interrupted while it was being tuned", **dict.fromkeys(problems[1:], UNTRIED)}
    report = tune_report(Wanted(problems), Tuned(failed=failed, code=130), [])
    show(report, as_json=False)
    told = capsys.readouterr().out
    assert "interrupted while it was being tuned" in told
    assert told.count(UNTRIED) == (2 if size == 2 else 1) and (f"40 more: {UNTRIED}" in told) == (size == 40)
    show(report, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["problem"]: row["why"] for row in rows} == {str(one): why for one, why in failed.items()}


@pytest.mark.long
@pytest.mark.usefixtures("beside_others")
def test_an_interrupt_loses_nothing_that_was_found(home: Path) -> None:
    (home / "u.csv").write_text(SHAPES)
    args = ["-i", "u.csv", "-o", "t.csv", "--dtype", "fp32", "--threads", "1"]
    with (home / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", "gemmtuned", "tune", *args], stdout=said)
    try:
        end = time.monotonic() + 60
        while not (home / "t.csv").exists() or len(read_file(home / "t.csv").rows) < 2:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
    told = (home / "said").read_text()
    assert "interrupted before it was tried" in told and "leased" not in told

    def stored() -> dict[Problem, int]:
        settings = Settings.from_env(dict(os.environ))
        store = Store(settings.db, locks=settings.locks)
        try:
            return {s.problem: s.generation for s in store.solutions.published()[1]}
        finally:
            store.close()

    def written() -> set[Problem]:
        solutions = [solution_of(row) for row in read_file(home / "t.csv").rows]
        return {solution.problem for solution in solutions if solution is not None}

    assert queries.untuned(Settings.from_env(dict(os.environ)).db) == []  # what was not reached is nobody's to tune
    first = stored()
    assert 2 <= len(first) < 8
    assert written() == set(first)
    assert list(home.glob(".t.csv*")) == []

    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert len(stored()) == len(written()) == 8
    assert {p: stored()[p] for p in first} == first  # none was tuned twice


def test_a_library_that_is_none_is_told_which_there_are_each_once() -> None:
    with pytest.raises(typer.BadParameter, match="--libtype 'cutless' is not one of all, ") as told:
        libraries(["torch,cutless"], tuple(NATIVE_CODES))
    names = str(told.value).partition(" is not one of ")[2].split(", ")

    assert {"torch", "triton", *NATIVE_CODES} <= set(names) and len(set(names)) == len(names)
