"""What a run of the tune command writes, says and leaves alone, also where it is interrupted."""

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
from typing import Any

import pytest
from tune_command import run

from gemmtuned.cli import build
from gemmtuned.commands import tune
from gemmtuned.commands.tune import _report as tune_report
from gemmtuned.commands.tune_sources import Wanted
from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import problem_of, solution_of
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Device, Solution
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.daemon.service.main import UNTRIED, Tuned
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.reports.render import show
from gemmtuned.reports.tuned_files import TunedTable

SHAPES = "M,N,K\n" + "".join(f"{m},{n},256\n" for n in (128, 256) for m in (1, 4, 8, 17))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    assert files.notes == [f"1 does not fit that table, for example {plain}: it is of AITER's family a8w8"]
    odd = replace(shuffled, bias=True)
    files.found([replace(made(16, device), problem=odd)], device)
    (note,) = files.notes
    assert note.startswith("2 do not fit that table")


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
