"""`gemmtuned import` and `export` as a user meets them: every row accounted for, and ours read by the same rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import says
from store_cases import new_file
from table_commands import CPU, Run, T, install, made

from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_rows import problem_of
from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.hooks.dispatch import Table, build_table

DATA = Path(__file__).parents[1] / "data/aiter"
H200 = Environment(
    Device(key="cuda-h200-132", kind="cuda", name="NVIDIA H200", arch="sm_90", units=132),
    {"torch": "2.13", "triton": "3.6/sm_90"},
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    home = tmp_path / "home"
    home.mkdir()
    return Store(new_file(home / "tune.db"), locks=home / "locks")


# ---- import


def test_a_dry_run_accounts_for_every_row_of_every_shipped_file_and_keeps_nothing(run: Run, tmp_path: Path) -> None:
    files = sorted([*DATA.rglob("*.csv"), *DATA.rglob("*.json")])

    code, said = run("import", "--dry-run", *map(str, files))

    assert (code, said["schema"], said["dry_run"]) == (0, "gemmtuned.import/1", True)
    assert len(said["files"]) == len(files) == 64
    for path, row in zip(files, said["files"], strict=True):
        assert set(row) >= {"path", "family", "kind", "rows", "imported", "rejected", "reasons"}
        text = path.read_text()
        rows = (
            len(json.loads(text)) if path.suffix == ".json" else
            sum(bool(line.replace(",", "").strip()) for line in text.splitlines()) - 1
        )  # fmt: skip
        assert (row["path"], row["rows"], row["imported"], row["rejected"]) == (str(path), rows, rows, 0), path
        assert row["kind"] == ("untuned" if "untuned" in path.name else "tuned"), path
        assert row["family"]
        assert row["reasons"] == []
    assert not (tmp_path / "home").exists()


def test_a_folder_of_tables_is_imported_file_by_file(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("a_untuned_gemm.csv", "b_untuned_gemm.csv"):
        (folder / name).write_text("M,N,K\n8,64,64\n")
    (folder / "notes.txt").write_text("nothing of ours")

    code, said = run("import", str(folder), "--json")
    assert code == 0
    assert [Path(row["path"]).name for row in said["files"]] == ["a_untuned_gemm.csv", "b_untuned_gemm.csv"]


def test_bad_rows_stop_an_import_unless_they_are_skipped(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "bf16_tuned_gemm.csv"
    table.write_text(
        "M,N,K,dtype,libtype,solidx,us\n8,8,8,bf16,asm,1,5\n,,\nx,8,8,bf16,asm,1,5\n8,8,8,bf16,asm,auto,5\n"
    )

    code, said = run("import", str(table))

    (row,) = said["files"]
    assert (code, row["rows"], row["imported"], row["rejected"], said["kept"]) == (1, 3, 0, 2, False)
    assert row["reasons"] == [
        f"{table} line 4, column M: 'x' is not a whole number",
        f"{table} line 5, column solidx: 'auto' is not an integer",
    ]
    assert "--skip-bad-rows imports the other 1 row" in said["stderr"]
    assert not (tmp_path / "home/tune.db").exists()

    code, said = run("import", str(table), "--skip-bad-rows")
    assert (code, said["kept"]) == (0, True)
    assert len(queries.frame(tmp_path / "home/tune.db", "hints")) == 1


@pytest.mark.long
def test_import_counts_problems_and_not_rows_that_name_one_again(tmp_path: Path) -> None:
    (twice := tmp_path / "bf16_untuned_gemm.csv").write_text("M,N,K\n8,64,64\n8,64,64\n9,64,64\n")
    (bare := tmp_path / "shapes.csv").write_text("M,N,K\n8,64,64\n")

    said = [says(tmp_path / "home", "import", "--dry-run", str(path)).stdout for path in (twice, bare)]

    assert "3 rows would be kept: 0 seeds for the search, 2 problems to tune" in said[0]
    assert "1 row would be kept: 0 seeds for the search, 0 problems to tune" in said[1]


def test_import_says_every_error_once_and_on_stderr(tmp_path: Path) -> None:
    for name, value in (("one", "x"), ("two", "y")):
        lines = f"M,N,K,dtype,libtype,solidx,us\n8,8,8,bf16,asm,1,5\n{value},8,8,bf16,asm,1,5\n"
        (tmp_path / f"{name}_gemm.csv").write_text(lines)
    env = {**os.environ, "GEMMTUNED_HOME": str(tmp_path / "home")}

    def run(*more: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "gemmtuned", "import", "one_gemm.csv", "two_gemm.csv", "gone.csv", *more]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 1
        return done.stdout, done.stderr

    table, errors = run()
    assert "line 3" not in table and "gone.csv:" not in table
    assert [line.split(",")[0].split(":")[1] for line in errors.splitlines()] == [
        " gone.csv", " one_gemm.csv line 3", " two_gemm.csv line 3",
    ]  # fmt: skip
    assert errors.endswith("Bad rows in all: 2; --skip-bad-rows imports the other 2 rows\n")

    table, errors = run("--skip-bad-rows")
    assert table.count("line 3") == 2, "no errors any more, so the table says what was skipped"
    assert "gone.csv" in errors and "line 3" not in errors


def test_a_file_of_another_kind_is_refused_with_what_is_read_and_no_empty_table(tmp_path: Path) -> None:
    (tmp_path / "names.csv").write_text("name,mail\nx,y\n")
    (tmp_path / "bad_gemm.csv").write_text("M,N,K,dtype,libtype,solidx,us\nx,8,8,bf16,asm,1,5\n")
    env = {**os.environ, "GEMMTUNED_HOME": str(tmp_path / "home")}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gemmtuned", "import", name]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)

    done = run("names.csv")
    assert (done.returncode, done.stdout) == (1, "")
    assert "'name,mail'" in done.stderr and "AITER's" in done.stderr and "TunableOp's" in done.stderr
    assert run("bad_gemm.csv").stderr.endswith("Bad rows in all: 1; no row is good\n")


def test_a_file_that_cannot_be_read_is_named_and_costs_that_file_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "garbage.csv").write_bytes(b"\0\1\2" * 100)
    good = str(DATA / "configs/bf16_tuned_gemm.csv")

    code, said = run("import", str(tmp_path / "garbage.csv"), str(tmp_path / "gone.csv"), good)

    assert (code, said["kept"]) == (1, True)
    assert len(queries.frame(tmp_path / "home/tune.db", "hints")) == 232
    assert [(row["rows"], bool(row["reasons"])) for row in said["files"]] == [(232, False), (0, True), (0, True)]
    assert "gone.csv" in said["stderr"]


def test_a_file_whose_name_is_not_utf_8_is_imported_and_imported_again(run: Run, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9_bf16.csv"
    Path(os.fsdecode(path)).write_text("M,N,K\n8,64,64\n")

    for _ in range(2):
        assert run("import", os.fsdecode(path), "--threads", "2")[0] == 0

    (row,) = queries.ask(tmp_path / "home/tune.db", "SELECT source FROM hints")
    assert row["source"] == f"{tmp_path}/caf\\udce9_bf16.csv"


def test_without_a_file_those_of_aiters_variables_are_imported_by_their_family(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"  # a name that tells nothing
    mine.write_text("gfx,cu_num,M,N,K,libtype,kernelId,us\ngfx942,304,1,512,512,ck,8,1.5\n")

    code, said = run("import", AITER_CONFIG_GEMM_A8W8_BLOCKSCALE=str(mine))

    assert (code, [row["family"] for row in said["files"]]) == (0, ["a8w8_blockscale"])
    assert run("import", str(mine))[0] == 1
    assert run("import", str(mine), "--family", "a8w8_blockscale")[0] == 0
    assert len(queries.frame(tmp_path / "home/tune.db", "hints")) == 1


def test_an_untuned_list_is_queued_where_programs_were_seen_and_call_such_products(
    run: Run, store: Store, tmp_path: Path
) -> None:
    seen = Problem(m=8, n=8, k=8, threads=4)
    store.sightings.add("serve", CPU, [Sighting(seen, "miss", 9)], now_s=T)
    store.sightings.add("serve", H200, [Sighting(Problem(m=8, n=8, k=8), "miss", 9, place="cuda:0")], now_s=T)
    store.close()
    names = ("model_configs/kimik2_bf16", "configs/a8w8", "configs/a4w4_blockscale")
    lists = [str(DATA / f"{name}_untuned_gemm.csv") for name in names]

    code, said = run("import", *lists, "--threads", "4")

    rows = queries.untuned(tmp_path / "home/tune.db")
    assert (code, said["queued"]) == (0, 191 + 194)  # those of the third list, where they are called: on GPUs
    assert sum(row["device"] == CPU.device.key and row["calls"] == 0 and row["threads"] == 4 for row in rows) == 191
    gpu = [row for row in rows if row["device"] == H200.device.key and row["calls"] == 0]
    assert {(row["dtype"], row["threads"], row["math_mode"]) for row in gpu} == {
        ("bf16", 0, "reduced"),  # what torch's defaults give there
        ("fp8_e4m3", 0, "ieee"),
        ("i8", 0, "ieee"),
        ("fp4_e2m1", 0, "ieee"),
    }
    assert sum(row["wdtype"] == "fp4_e2m1" for row in gpu) == sum(row["wdtype"] == "fp4_e2m1" for row in rows) == 194


def test_mixtures_with_weights_of_4_bits_are_queued_for_cpus_that_call_them(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "untuned_fmoe.csv"
    table.write_text(
        "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1\n"
        "16,256,256,4,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.float4_e2m1fn_x2,QuantType.per_1x32,1,0\n"
    )

    code, said = run("import", str(table), "--threads", "1")

    (row,) = queries.untuned(tmp_path / "home/tune.db")
    assert (code, said["queued"], row["wdtype"], row["family"]) == (0, 1, "fp4_e2m1", "moe")


def test_seeds_of_libraries_that_are_not_here_are_shown_by_explain(run: Run) -> None:
    run("import", str(DATA / "configs/bf16_tuned_gemm.csv"))

    _, said = run("explain", "bf16>fp32:64x256x5120,threads=2")

    assert (said["hints"][0]["backend"], said["hints"][0]["m"], said["hints"][0]["arch"]) == ("asm", 64, "gfx950")
    assert said["hints"][0]["source"].endswith("bf16_tuned_gemm.csv")


# ---- the trace close to live traffic


def trace() -> list[Problem]:
    rows = read_file(DATA / "model_configs/glm47_bf16_untuned_gemm.csv").rows
    return [problem for row in rows if (problem := problem_of(row, threads=4)) is not None]


def test_the_trace_collapses_to_70_fine_and_16_coarse_keys() -> None:
    def keys(covers: str) -> int:
        return len({p.with_m(padded_m(p.m, p.n, covers)) for p in trace()})

    assert (len(trace()), keys("exact"), keys("fine"), keys("coarse")) == (1321, 1321, 70, 16)


def test_tune_plans_the_trace(run: Run) -> None:
    path = DATA / "model_configs/glm47_bf16_untuned_gemm.csv"

    code, said = run("tune", "-i", str(path), "--dry-run", "--threads", "4")

    assert code == 0
    assert len({row["problem"] for row in said["rows"]}) == 1321


def test_coverage_answers_exact_padded_and_missed_for_the_trace(run: Run, store: Store, tmp_path: Path) -> None:
    """Every third fine bucket and five exact sizes beside them are tuned; the outcomes are the look-up's own."""
    problems = trace()
    buckets = sorted({p.with_m(padded_m(p.m, p.n, "fine")) for p in problems}, key=str)[::3]
    exact = [p for p in problems if p.with_m(padded_m(p.m, p.n, "fine")) not in buckets][:5]
    solutions = [made(p, "onednn", covers="fine") for p in buckets] + [made(p, "onednn") for p in exact]
    table = build_table(solutions, {"cpu": CPU}, generation=1, failed=frozenset())
    told = [(p, table.find(p)[0]) for p in problems]
    install(store, CPU, *solutions)
    import time

    store.sightings.add("serve", CPU, [Sighting(p, outcome, 10) for p, outcome in told], now_s=time.time())
    store.close()

    _, said = run("coverage", "--by", "family", "--weight", "calls")

    (row,) = said["rows"]
    outcomes = [outcome for _, outcome in told]
    padded = sum(p.with_m(padded_m(p.m, p.n, "fine")) in buckets for p in problems)
    assert (outcomes.count("exact"), outcomes.count("padded")) == (5, padded)
    assert (row["problems"], row["tuned_problems"], row["calls"]) == (1321, 5 + padded, 13_210)
    assert (row["exact_calls"], row["padded_calls"]) == (50, 10 * padded)
    assert row["missed_calls"] == 13_210 - 50 - 10 * padded
    assert 200 < padded < 1000
    assert isinstance(table, Table)


@pytest.mark.long
def test_the_commands_are_named_as_people_type_them(tmp_path: Path) -> None:
    for name in ("import", "export"):
        env = {**os.environ, "GEMMTUNED_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "gemmtuned", name, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        assert f"Usage: gemmtuned {name}" in done.stdout, done.stderr


def test_doctor_says_what_the_tables_of_aiters_variables_hold(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("M,N,K,dtype,libtype,us\n8,8,8,bf16,asm,1\nx\n")
    theirs = DATA / "configs/a8w8_tuned_gemm.csv"

    code, said = run(
        "doctor",
        "--quick",
        AITER_CONFIG_GEMM_A8W8=str(theirs),
        AITER_CONFIG_GEMM_BF16=str(bad),
        AITER_CONFIG_FMOE="/gone",
    )

    found = {check["name"]: check for check in said["checks"] if check["name"].startswith("AITER_CONFIG")}
    assert {name: check["result"] for name, check in found.items()} == {
        "AITER_CONFIG_GEMM_BF16": "WARN", "AITER_CONFIG_GEMM_A8W8": "PASS", "AITER_CONFIG_FMOE": "FAIL",
    }  # fmt: skip
    assert "579 rows, 0 of them measured by gemmtuned" in found["AITER_CONFIG_GEMM_A8W8"]["found"]
    assert "; 1 bad row left out" in found["AITER_CONFIG_GEMM_BF16"]["found"]
    assert {row["name"]: row["value"] for row in said["settings"]}["AITER_CONFIG_GEMM_A8W8"] == str(theirs)
    assert code == 1
