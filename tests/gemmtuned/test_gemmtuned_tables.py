"""`gemmtuned import` and `export` as a user meets them: every row accounted for, and ours read by the same rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, Home, published
from store_cases import new_file

from gemmtuned.cli import build
from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_rows import problem_of, solution_of
from gemmtuned.configs.formats import read_any
from gemmtuned.configs.merge import merge
from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.db import queries
from gemmtuned.db.leases import Work
from gemmtuned.db.store import Store
from gemmtuned.hooks.dispatch import Table, build_table

DATA = Path(__file__).parents[1] / "data/aiter"
T = 1_800_000_000.0
CPU = Environment(
    Device(key="cpu-test", kind="cpu", name="Test", arch="x86_64", units=4), {"torch": "2.13", "onednn": "1"}
)  # fmt: skip
H200 = Environment(
    Device(key="cuda-h200-132", kind="cuda", name="NVIDIA H200", arch="sm_90", units=132),
    {"torch": "2.13", "triton": "3.6/sm_90"},
)
MI300 = Environment(
    Device(key="rocm-mi300x-304", kind="rocm", name="MI300X", arch="gfx942", units=304),
    {"torch": "2.13", "onednn": "1"},
)
DENSE = Problem(m=8, n=2048, k=1024)
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `gemmtuned ARGS --json` in this process; (exit code, its JSON)."""

    def call(*args: str, **env: str) -> tuple[int, Any]:
        with monkeypatch.context() as patch:
            for variable in VARIABLES:
                patch.delenv(variable.name, raising=False)
            patch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
            for name, value in env.items():
                patch.setenv(name, value)
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                build()([*args, "--json"], prog_name="gemmtuned")
        out, err = capsys.readouterr()
        assert out, err
        return int(end.value.code or 0), {**json.loads(out), "stderr": err}

    return call


@pytest.fixture
def store(tmp_path: Path) -> Store:
    home = tmp_path / "home"
    home.mkdir()
    return Store(new_file(home / "tune.db"), locks=home / "locks")


def made(problem: Problem, backend: str = "torch", environment: Environment = CPU, **columns: Any) -> Solution:
    values: dict[str, Any] = {
        "mode": "eager", "covers": "exact", "config": "{}", "us": 5.0, "baseline_us": 10.0, "gain_low": 1.5,
        "err": 1e-6, "baseline_err": 1e-6, "state": "published", **columns,
    }  # fmt: skip
    stamp = environment.stamps[backend]
    return Solution(problem=problem, device=environment.device.key, backend=backend, stamp=stamp, **values)


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


# ---- export, and back


def install(store: Store, environment: Environment, *solutions: Solution) -> None:
    store.solutions.install(None, solutions, environment=environment, now_s=T)


def test_an_aiter_table_of_ours_is_read_by_aiters_rules_and_comes_back_whole(
    run: Run, store: Store, tmp_path: Path
) -> None:
    dense = made(DENSE, "onednn", us=4.321)
    wide = made(Problem(m=32, n=512, k=64, dtype="fp32", threads=4), covers="fine", state="default_best")
    batched = made(Problem(family="batched", batch=16, m=4, n=64, k=64))
    odd = [
        made(Problem(m=8, n=64, k=64, layout="nn")),
        made(Problem(family="batched", batch=2, m=4, n=8, k=8, dtype="fp32")),
    ]
    install(store, CPU, dense, wide, batched, *odd)
    store.close()

    code, said = run("export", "--format", "aiter-csv", "--out", str(tmp_path / "out"))

    assert code == 0
    assert {Path(row["path"]).name: row["rows"] for row in said["files"]} == {
        "bf16_tuned_gemm.csv": 2, "bf16_tuned_batched_gemm.csv": 1,
    }  # fmt: skip
    assert [row["layout"] for row in said["left_out"]] == ["nn", "nt"]
    table = read_file(tmp_path / "out/bf16_tuned_gemm.csv")
    assert table.rejected == 0
    assert [(row["gfx"], row["cu_num"], row["libtype"], row.us) for row in table.rows] == [
        ("x86_64", "4", "onednn", 4.321), ("x86_64", "4", "torch", 5.0),
    ]  # fmt: skip
    assert problem_of(table.rows[0]) == DENSE
    # AITER's formulas: 2MNK / us, and two bytes for each of X, W and Y
    assert (table.rows[0]["tflops"], table.rows[0]["bw"]) == ("7.77", "982.05")
    backs = [solution_of(row) for row in table.rows]
    assert [(s.problem, s.backend, s.covers, s.stamp) for s in backs if s] == [
        (DENSE, "onednn", "exact", "1"), (wide.problem, "torch", "fine", "2.13"),
    ]  # fmt: skip
    merged = merge([tmp_path / "out/bf16_tuned_gemm.csv"], family="bf16")
    hit = merged.find(gfx="x86_64", cu_num=4, M=20, N=512, K=64, dtype="fp32", outdtype="fp32")
    assert hit is not None
    assert hit.m == 32  # the padded walk finds the row that covers its bucket
    again = run("import", str(tmp_path / "out/bf16_tuned_gemm.csv"), str(tmp_path / "out/bf16_tuned_batched_gemm.csv"))
    assert [row["imported"] for row in again[1]["files"]] == [2, 1]


def test_an_aiter_table_says_which_thread_count_it_holds(run: Run, store: Store, tmp_path: Path) -> None:
    shape = Problem(m=8, n=64, k=64, dtype="fp32")
    times = {1: 9.0, 4: 3.0, 2: 5.0}
    install(store, CPU, *(made(replace(shape, threads=threads), us=us) for threads, us in times.items()))
    install(
        store, CPU, *(made(replace(shape, n=128, threads=threads), us=us) for threads, us in {1: 2.0, 2: 4.0}.items())
    )
    store.close()

    _, said = run("export", "--format", "aiter-csv", "--out", str(tmp_path / "out"))

    written = "AITER's table does not tell the thread count: the row of thread count {} is written"
    assert [(row["n"], row["threads"], row["reason"]) for row in said["left_out"]] == [
        (64, 1, written.format(4)), (64, 2, written.format(4)), (128, 2, written.format(1)),
    ]  # fmt: skip
    assert said["notes"][1:] == [f"2 left out: {written.format(4)}", f"1 left out: {written.format(1)}"]


@pytest.mark.long
@pytest.mark.parametrize("format", ["aiter-csv", "gemmtuned"])
def test_what_an_equal_machine_measured_is_used_at_once_after_a_spot_check(
    run: Run, tmp_path: Path, format: str
) -> None:
    from gemmtuned.configs.manifest import read_manifest
    from gemmtuned.configs.solution import cpu_device
    from gemmtuned.kernels.backends import environment

    here = environment(cpu_device())
    right, broken = published(LINEAR, "torch_swap"), published(LINEAR.with_m(9), "torch_mv")  # made for M = 1 alone
    old = published(LINEAR.with_m(12), "torch_swap", stamp="1.0")
    there = Store(tmp_path / "there/tune.db", locks=tmp_path / "there/locks")
    there.solutions.install(None, [right, broken, old], environment=here, now_s=T)
    there.close()
    out = tmp_path / "out"
    run("export", "--format", format, "--out", str(out), GEMMTUNED_HOME=str(tmp_path / "there"))
    file = str(out)
    if format == "aiter-csv":  # others could have written any gain into it
        table = out if out.is_file() else next(out.rglob("*.csv"))
        table.chmod(0o666)
        said = run("import", file)[1]
        assert said["used"] == 0 and any("can be written by others" in reason for reason in said["not_used"])
        table.chmod(0o644)

    code, said = run("import", file)

    assert (code, said["used"], sum(said["not_used"].values())) == (0, 1, 2)
    assert any("torch_mv does not run" in reason for reason in said["not_used"])
    assert any("another version (1.0)" in reason for reason in said["not_used"])
    manifest = read_manifest(tmp_path / "home/configs")
    assert manifest is not None
    assert sum(one.rows for one in manifest.files) == 1
    store = Store(tmp_path / "home/tune.db", locks=tmp_path / "home/locks")
    assert [s.problem for s in store.solutions.published()[1]] == [LINEAR]
    store.close()
    assert run("import", file)[1]["not_used"]["this machine has a verdict of its own"] == 1
    assert run("import", file, "--no-use")[1]["used"] == 0


def test_rows_that_would_stop_an_aiter_program_are_left_out(run: Run, store: Store, tmp_path: Path) -> None:
    install(store, MI300, made(DENSE, "onednn", MI300), made(DENSE.with_m(16), "torch", MI300))
    store.close()

    _, said = run("export", "--format", "aiter-csv", "--out", str(tmp_path / "out"))

    assert [row["rows"] for row in said["files"]] == [1]
    assert [row["backend"] for row in said["left_out"]] == ["onednn"]
    assert "would stop at the row" in said["left_out"][0]["reason"]


TILE = {
    "kernel": "tiles",
    "rows": 64,
    "tokens": 16,
    "block_k": 128,
    "split": 1,
    "group": 1,
    "swap": 0,
    "warps": 4,
    "stages": 3,
}


def tile(**more: int) -> str:
    return Candidate.of("triton", **{**TILE, **more}).config  # type: ignore[arg-type]


def test_tile_files_of_ours_have_a_default_and_are_read_back(run: Run, store: Store, tmp_path: Path) -> None:
    def at(m: int, n: int, config: str, mode: str = "eager") -> Solution:
        return made(Problem(m=m, n=n, k=1024), "triton", H200, config=config, mode=mode)

    install(
        store, H200, at(8, 2048, tile(warps=4)), at(100, 2048, tile(warps=8)), at(8, 512, tile(warps=8)),
        at(8, 256, tile(warps=8)), made(DENSE.with_m(3), "torch", H200),
    )  # fmt: skip
    for n, times in {2048: {4: 5.0, 8: 15.0}, 512: {4: 5.0, 8: 4.9}, 256: {4: 5.0, 8: 4.9}}.items():
        p = Problem(m=8, n=n, k=1024)
        work = Work(p, (p,), "exact", H200, "eager", "host:1", 1, 1.0, 1)
        for warps, us in times.items():
            store.trials.add(
                work, p, Candidate("triton", tile(warps=warps)), phase="screen", us=us,
                err=None, outcome="ok", note="", started_us=1,
            )  # fmt: skip
    store.close()

    _, said = run("export", "--format", "triton-json", "--out", str(tmp_path / "a"))
    _, common = run("export", "--format", "triton-json", "--out", str(tmp_path / "b"), "--default", "most-common")

    names = {Path(row["path"]).name for row in said["files"]}
    assert names == {f"sm_90-GEMM-A16W16{end}.json" for end in ("", "-N=2048-K=1024", "-N=512-K=1024", "-N=256-K=1024")}
    assert [row["reason"] for row in said["left_out"]] == ["no tile of a plain 16-bit product"]
    special = json.loads((tmp_path / "a/sm_90-GEMM-A16W16-N=2048-K=1024.json").read_text())
    assert list(special) == ["M_LEQ_8", "M_LEQ_128", "any"]
    assert special["M_LEQ_8"]["BLOCK_SIZE_N"] == 64
    # most files have 8 warps, but those lose a factor of three at N = 2048
    by_regret, by_count = (json.loads((tmp_path / f / "sm_90-GEMM-A16W16.json").read_text()) for f in "ab")
    assert (by_regret["M_LEQ_8"]["num_warps"], by_count["M_LEQ_8"]["num_warps"]) == (4, 8)
    assert common["files"] == [{**row, "path": row["path"].replace("/a/", "/b/")} for row in said["files"]]
    (hint,) = [
        hint for hint in read_any(tmp_path / "a/sm_90-GEMM-A16W16-N=2048-K=1024.json").hints if '"M_LEQ_8"' in hint.row
    ]
    assert (hint.problem, hint.candidate) == (DENSE, Candidate("triton", tile()))


@pytest.mark.parametrize(("format", "rows"), [("tunableop", 1), ("inductor", 2), ("vllm-moe", 0)])
def test_other_tools_get_what_they_can_hold_and_the_rest_is_counted(
    run: Run, store: Store, tmp_path: Path, format: str, rows: int
) -> None:
    install(
        store,
        H200,
        made(DENSE, "torch", H200, state="default_best"),
        made(DENSE.with_m(9), "triton", H200, config=tile()),
    )
    store.close()

    code, said = run("export", "--format", format, "--out", str(tmp_path / "out"))

    assert (code, sum(row["rows"] for row in said["files"]), len(said["left_out"])) == (int(not rows), rows, 2 - rows)
    for row in said["files"]:
        found = read_any(Path(row["path"]))
        assert (found.format, len(found.hints), found.rejected) == (format, rows, 0)
    if format == "tunableop":
        assert "Validator,PT_VERSION,2.13" in Path(said["files"][0]["path"]).read_text()


@pytest.mark.parametrize("format", ["vllm", "sglang", "vllm-blockscale"])
def test_tiles_of_another_tools_kernels_are_no_format_and_the_error_says_why(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build()(["export", "--format", format, "--out", str(tmp_path / "out")], prog_name="gemmtuned")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())

    assert ended.value.code == 2
    for part in (
        f"'{format}' is none of aiter-csv",
        "tiles of their own Triton kernel",
        "--format gemmtuned",
        "vllm-moe",
    ):
        assert part in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["aiter-csv", "triton-json", "tunableop", "inductor", "gemmtuned"])
def test_an_export_replaces_what_it_wrote_and_nothing_of_others(
    run: Run, store: Store, tmp_path: Path, format: str
) -> None:
    install(store, H200, made(DENSE, "torch", H200), made(DENSE.with_m(9), "triton", H200, config=tile()))
    store.close()
    out = tmp_path / "out"

    def export(*more: str) -> tuple[int, Any]:
        return run("export", "--format", format, "--out", str(out), *more)

    _, said = export()
    name = "manifest.json" if format == "gemmtuned" else Path(said["files"][0]["path"]).name
    assert said["replaces"] == []
    code, said = export()
    assert code == 0 and str(out / name) in said["replaces"]

    (out / name).write_text("{}")  # somebody's own
    code, said = export("--dry-run")
    assert code == 1 and str(out / name) in said["replaces"] and "--force" in said["stderr"]
    with pytest.raises(AssertionError, match=rf"{name}.*--force"):  # nothing on stdout
        export()
    assert (out / name).read_text() == "{}"
    assert export("--dry-run", "--force")[0] == 0 and (out / name).read_text() == "{}"
    assert export("--force")[0] == 0 and (out / name).read_text() != "{}"
    assert export()[0] == 0


def test_a_host_runs_from_an_exported_folder_without_a_database_and_cannot_write_to_it(home: Home, run: Run) -> None:
    there = published(LINEAR, "torch_swap")
    from gemmtuned.configs.solution import cpu_device
    from gemmtuned.kernels.backends import environment

    source = home.path.parent / "home"
    source.mkdir(exist_ok=True)
    store = Store(source / "tune.db", locks=source / "locks")
    install(store, environment(cpu_device()), there)
    store.close()
    folder = home.path.parent / "bundle"
    assert run("export", "--format", "gemmtuned", "--out", str(folder), "--dry-run")[1]["files"][0]["rows"] == 1
    assert not folder.exists()
    assert run("export", "--format", "gemmtuned", "--out", str(folder))[0] == 0
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    listed = sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*"))
    production = home.path.parent / "production"

    done = home.run(
        """
        import json, time, torch, gemmtuned
        torch.set_num_threads(2)
        x, w = torch.randn(4, 16), torch.randn(8, 16)
        until = time.monotonic() + 20
        while not gemmtuned.status()["rows"] and time.monotonic() < until:
            time.sleep(0.01)
        y = torch.nn.functional.linear(x, w)
        time.sleep(0.3)
        print(json.dumps({**gemmtuned.status(), "right": torch.allclose(y, x @ w.t(), atol=1e-5)}))
        """,
        AITER_TUNE_GEMM="0", GEMMTUNED_DISPATCH="1", GEMMTUNED_CONFIG_DIR=str(folder), GEMMTUNED_HOME=str(production),
    )  # fmt: skip

    assert (done.said["rows"], done.said["generation"], done.said["right"]) == (1, 1, True), done.err
    assert not (production / "tune.db").exists()
    assert sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*")) == listed
    folder.chmod(0o755)


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
