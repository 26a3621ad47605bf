"""`gemmtuned tune` as a user of AITER's tuners types it: its flags, the files it writes, an interrupt on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from gemmtuned.cli import build
from gemmtuned.commands.aiter_flags import NO_EFFECT, translate
from gemmtuned.commands.tune_options import libraries
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.service.main import Tuned
from gemmtuned.hooks.dispatch import NATIVE_CODES
from gemmtuned.reports.progress import Left

PROBLEM = Problem(m=8, n=64, k=64, dtype="fp32", threads=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_a_library_that_is_none_is_told_which_there_are_each_once() -> None:
    with pytest.raises(typer.BadParameter, match="--libtype 'cutless' is not one of all, ") as told:
        libraries(["torch,cutless"], tuple(NATIVE_CODES))
    names = str(told.value).partition(" is not one of ")[2].split(", ")

    assert {"torch", "triton", *NATIVE_CODES} <= set(names) and len(set(names)) == len(names)
