"""Where the tune command has its problems from: lists, tables, models, what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import environment, says
from store_cases import found, saw
from tune_command import run

from gemmtuned.cli import build
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Device, Environment, cpu_device
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.daemon.device.devices import CpuMonitor, find_monitors
from gemmtuned.daemon.seats.request import Request
from gemmtuned.db.store import Store
from gemmtuned.reports.chosen import of_table

DATA = Path(__file__).parents[1] / "data"
PROBLEM = Problem(m=8, n=64, k=64, dtype="fp32", threads=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


@pytest.mark.parametrize("listed", ["fp32:8x64x64,threads=2\n", "\ufeffM,N,K\r\n8,64,64\r\n"], ids=["list", "table"])
def test_problems_are_read_from_stdin(home: Path, listed: str) -> None:
    command = [sys.executable, "-m", "gemmtuned", "tune", "-i", "-", "--dtype", "fp32", "--threads", "2", "--dry-run"]
    done = subprocess.run(command, input=listed, capture_output=True, text=True, env=environment(home), cwd=home)
    assert done.stdout.splitlines()[:2] == ["problem", "fp32:8x64x64,threads=2"], done.stderr


def test_a_list_that_cannot_be_read_is_said(home: Path) -> None:
    for given, why in (("none", "file 'none' does not exist"), (".", "file '.' is a directory")):
        done = says(home, "tune", "-i", given, "--dry-run")
        assert done.returncode == 2 and why in done.stderr


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
