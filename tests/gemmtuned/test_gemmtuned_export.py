"""The export command: what it writes, for whom, and that it comes back whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, Home, published
from store_cases import new_file
from table_commands import CPU, Run, T, install, made

from gemmtuned.cli import build
from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_rows import problem_of, solution_of
from gemmtuned.configs.formats import read_any
from gemmtuned.configs.merge import merge
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.db.leases import Work
from gemmtuned.db.store import Store

H200 = Environment(
    Device(key="cuda-h200-132", kind="cuda", name="NVIDIA H200", arch="sm_90", units=132),
    {"torch": "2.13", "triton": "3.6/sm_90"},
)
MI300 = Environment(
    Device(key="rocm-mi300x-304", kind="rocm", name="MI300X", arch="gfx942", units=304),
    {"torch": "2.13", "onednn": "1"},
)
DENSE = Problem(m=8, n=2048, k=1024)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    home = tmp_path / "home"
    home.mkdir()
    return Store(new_file(home / "tune.db"), locks=home / "locks")


# ---- export, and back


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
