"""Reports: how values are spelled, what a comparison may claim, what a list of problems gives, text and JSON."""

from __future__ import annotations

import json
import random
import time

import pytest

from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.human_units import duration
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats.work_queue import owner_name
from gemmtuned.reports import comparison, progress, render
from gemmtuned.reports.coverage import report as coverage_report
from gemmtuned.reports.environments import abridged
from gemmtuned.reports.gains import report as gains_report
from gemmtuned.reports.problem_list import Shape, read_list, shape_or_problem
from gemmtuned.reports.render import Column, Report, Table
from gemmtuned.reports.status import report as status_report


@pytest.mark.parametrize(
    ("spell", "value", "text"),
    [
        (duration, 8.414, "8.41 us"),
        (duration, 999.7, "1.00 ms"),
        (duration, 12_345, "12.3 ms"),
        (duration, 4.2e6, "4.20 s"),
        (duration, 7.2e9, "2.00 h"),
        (render.percent, 0.9999, "99.9 %"),  # not all of it
        (render.percent, 1.0, "100.0 %"),
        (render.percent, 1e-9, "0.1 %"),  # not nothing
        (render.percent, 0.0, "0.0 %"),
        (render.count, 1234567, "1,234,567"),
        (render.flops, 4.3e12, "4.30 TFLOP"),
        (render.size, 3 << 30, "3.00 GiB"),
        (render.age, 7300, "2 h ago"),
        (render.age, -5, "0 s ago"),  # a clock that went back
    ],
)
def test_a_value_is_spelled_for_people(spell: object, value: float, text: str) -> None:
    assert spell(value) == text  # type: ignore[operator]


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[31mred\x1b[0m",
        "\x1b]0;t\x07",
        "\x1b]8;;http://x\x1b\\link",
        "a\nb\r\x00\x08",
        "\x9b2Jgone",
        "\u202eabc",
    ],
)
def test_no_name_can_write_escapes_to_a_terminal(hostile: str) -> None:
    kept = render.clean(hostile)

    assert not [c for c in kept if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"]


def test_a_name_in_brackets_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("rows", [Column("name", "name")], [{"name": "[red]x[/red] :smile:"}])

    render.show(Report("test", [table]), as_json=False)

    assert "[red]x[/red] :smile:" in capsys.readouterr().out


def test_a_long_row_is_not_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("rows", [Column("name", "name", right=False), Column("m", "m")], [{"name": "x" * 300, "m": 7}])

    render.show(Report("test", [table]), as_json=False)

    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split() == ["x" * 300, "7"]


def test_a_column_below_has_a_line_of_its_own_where_a_row_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "torch", "found": "2.13", "fix": None}, {"name": "hook", "found": "not built", "fix": "build it"}]
    columns = (Column("name", "check", right=False), Column("found", "found", right=False))

    render.show(Report("test", [Table("t", columns, rows, below=Column("fix", "to mend it"))]), as_json=False)

    shown = capsys.readouterr().out.splitlines()
    assert shown == ["check  found", "torch  2.13", "hook   not built", "       to mend it: build it"]


def test_json_is_valid_whatever_the_figures() -> None:
    rows = [{"us": float("nan"), "low": float("-inf"), "name": "\x1b[31m", "none": None}]

    parsed = json.loads(render.to_json(Report("gains", [Table("rows", (), rows)], facts={"saved_us": float("inf")})))

    assert parsed["schema"] == "gemmtuned.gains/1"
    assert parsed["saved_us"] is None
    assert parsed["rows"] == [{"us": None, "low": None, "name": "\x1b[31m", "none": None}]


def test_a_clear_gain_is_called_better() -> None:
    found = comparison.ratio([10.0, 10.2, 9.9, 10.1, 10.0], [8.0, 8.1, 8.2, 7.9, 8.0], higher_is_better=False)

    assert found.verdict == "better"
    assert found.median == pytest.approx(1.25, rel=0.03)


def test_more_tokens_per_second_is_better_and_fewer_worse() -> None:
    off, more = [100.0] * 5, [110.0, 111.0, 109.0, 112.0, 110.0]

    assert comparison.ratio(off, more, higher_is_better=True).verdict == "better"
    assert comparison.ratio(more, off, higher_is_better=True).verdict == "worse"


def test_three_rounds_claim_nothing() -> None:
    assert comparison.ratio([2.0] * 3, [1.0] * 3, higher_is_better=False).verdict == "too few rounds"


@pytest.mark.parametrize("rounds", [5, 6, 9, 20])
def test_equal_arms_are_seldom_called_different(rounds: int) -> None:
    rng = random.Random(rounds)
    wrong = 0
    for _ in range(400):
        off, on = ([rng.lognormvariate(0, 0.05) for _ in range(rounds)] for _ in range(2))
        wrong += comparison.ratio(off, on, higher_is_better=False).verdict != "within noise"

    assert wrong / 400 < 0.10  # the interval's own promise is 6.25 % at 5 rounds and at most 5 % from 6 on


def test_the_interval_says_its_true_confidence() -> None:
    found = comparison.ratio([1.0] * 5, [1.0, 1.1, 0.9, 1.2, 0.8], higher_is_better=False)

    assert found.confidence == pytest.approx(1 - 2 / 2**5)


def test_a_plain_list_gives_each_problem_once_and_names_bad_lines() -> None:
    lines = ["# decode", "fp32:8x2048x1024,threads=2   # hot", "", "fp32:8x2048x1024,threads=2", "  fp32:8xx1024"]

    found = read_list(lines, name="shapes.txt", dtype="bf16", threads=0)

    assert found.problems == (Problem(m=8, n=2048, k=1024, dtype="fp32", threads=2),)
    assert len(found.complaints) == 1
    assert found.complaints[0].startswith("shapes.txt line 5, column 3: 'fp32:8xx1024' is not a problem")


def test_a_table_of_another_kind_is_refused_whole_and_not_row_by_row() -> None:
    lines = ["M,N,K", "1,1280,8192"]

    with pytest.raises(TableError, match="family a6w6_blockscale cannot be tuned yet"):
        read_list(lines, name="a6w6_blockscale_untuned_gemm.csv", dtype="bf16", threads=2)


def test_mixtures_of_a_table_are_tuned_and_a_row_that_cannot_be_is_said() -> None:
    header = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
    fp4, int4 = "torch.float4_e2m1fn_x2", "torch.int4"
    rows = [
        f"16,512,256,64,8,ActivationType.Silu,torch.bfloat16,{x},{w},QuantType.{kind},1,0"
        for x, w, kind in (
            (fp4, fp4, "per_1x32"), ("torch.float8_e4m3fn", fp4, "per_1x32"), ("torch.bfloat16", int4, "per_1x32"),
            ("torch.bfloat16", "torch.bfloat16", "No"), ("torch.bfloat16", int4, "per_Token"),
            ("torch.bfloat16", "torch.bfloat16", "per_1x999"),
        )
    ]  # fmt: skip

    found = read_list([header, *rows], name="untuned_fmoe.csv", dtype="bf16", threads=0, gpu=True)

    ends = "experts=64,topk=8,inter=256,act=silu_gated"
    assert [*map(str, found.problems)] == [
        f"moe:bf16{kind}math=reduced,{ends}"
        for kind in (
            "/fp4_e2m1:16x512x512,wscale=1x32,",
            "/i4:16x512x512,wscale=1x32,wscaledtype=bf16,",
            ":16x512x512,",
        )
    ]
    assert [said.split(",")[0] for said in found.complaints] == ["untuned_fmoe.csv line 6", "untuned_fmoe.csv line 7"]
    assert "cannot be tuned yet" in found.complaints[0] and "wscale is 'per_1x999'" in found.complaints[1]


def test_programs_that_replay_old_kernels_are_named_in_coverage() -> None:
    rows = [{"run": "serve.py", "problem": f"bf16:{m}x8x8"} for m in (1, 2, 2)] + [{"run": "a.py", "problem": "x"}]

    said = coverage_report([], by="family", weight="time", since_s=60.0, frozen=rows)

    assert said.facts["frozen_problems"] == 3
    assert [note.split(":")[:2] for note in said.notes] == [
        ["a.py", " 1 problem is tuned, frozen in a graph"],
        ["serve.py", " 2 problems are tuned, frozen in a graph"],
    ]


def test_coverage_says_how_much_of_the_time_is_an_estimate() -> None:
    row = dict.fromkeys(("calls", "exact_calls", "padded_calls", "missed_calls", "problems", "tuned_problems"), 1)
    row |= {"family": "dense", "device": "d", "time_us": 80.0, "covered_time_us": 0.0, "estimated_time_us": 60.0}
    row |= {"faster_time_us": 0.0, "now_time_us": 80.0}

    said = coverage_report([row], by="family", weight="time", since_s=60.0)
    all_timed = coverage_report([{**row, "estimated_time_us": 0.0}], by="family", weight="time", since_s=60.0)

    assert said.facts["total"]["estimated_share"] == 0.75
    told = "estimated: 75.0 % of the GEMM time, by size alone: of problems neither tuned nor timed "
    told += "(calls made while the program waited for a CPU are not timed)"
    assert [line for line in said.lines if line.startswith("estimated")] == [told]
    assert not [line for line in all_timed.lines if line.startswith("estimated")]


def test_what_a_gain_is_at_least_is_never_more_than_the_gain() -> None:
    row = {
        "problem": "fp32:8x64x64", "covers": "exact", "backend": "onednn", "config": "{}", "baseline_us": 10.366,
        "us": 10.0, "speedup": 1.0366, "gain_low": 1.0435, "err": 0.0, "hit_calls": 1, "saved_us": 1.0,
        "state": "published", "published": 0, "mode": "eager",
    }  # fmt: skip

    (shown,) = gains_report([row], every=False, limit=0, now_us=1).tables[0].rows

    assert shown["gain_low"] == shown["speedup"] == 1.0366


def gain_row(saved_us: float = 1.0, state: str = "published", **columns: object) -> dict[str, object]:
    """A row of the view `solutions`."""
    return {
        "problem": "fp32:8x64x64", "covers": "exact", "backend": "onednn", "config": "{}", "baseline_us": 20.0,
        "us": 10.0, "speedup": 2.0, "gain_low": 1.9, "err": 0.0, "hit_calls": 1, "saved_us": saved_us,
        "state": state, "published": 0, "mode": "eager", "others": None, "recheck": None, **columns,
    }  # fmt: skip


@pytest.mark.parametrize("every", [False, True])
def test_gains_says_how_much_was_saved_by_what_is_no_longer_in_use(every: bool) -> None:
    rows = [gain_row(3e6), gain_row(1e6, "stale"), gain_row(1e6, "withdrawn")]

    said = gains_report(rows, every=every, limit=0, now_us=1)
    without = gains_report([gain_row(3e6), gain_row(0.0, "stale")], every=every, limit=0, now_us=1)

    assert said.notes[0].startswith("saved so far: 5.00 s of GEMM time, 2.00 s of it by solutions no longer in use")
    assert without.notes[0].startswith("saved so far: 3.00 s of GEMM time; 1 problem faster")


def test_only_what_is_in_use_waits_to_be_measured_again() -> None:
    crowded = {"others": 0.7, "recheck": "drift"}
    rows = [gain_row(**crowded), gain_row(state="stale", **crowded), gain_row(state="withdrawn", **crowded)]

    said = " ".join(gains_report(rows, every=True, limit=0, now_us=1).notes)
    retired = " ".join(gains_report(rows[1:], every=True, limit=0, now_us=1).notes)

    assert "3 problems were timed while others used" in said and "1 of them waits for a daemon" in said
    assert "2 problems were timed while others used" in retired and "wait for a daemon" not in retired


def test_shapes_are_read_as_three_numbers_or_as_one_word_and_problems_between_them() -> None:
    text = "8 2048 512 bf16:8x64x64,threads=2 16x2048x512 1 2 3"

    assert shape_or_problem(text.split()) == [
        Shape(8, 2048, 512), "bf16:8x64x64,threads=2", Shape(16, 2048, 512), Shape(1, 2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["8 2048", "8", "8 2048 512 4", "8 2048 bf16:8x64x64"])
def test_numbers_that_make_no_shape_are_refused(text: str) -> None:
    with pytest.raises(ProblemError, match="a shape is three numbers"):
        shape_or_problem(text.split())


def test_where_there_is_no_bar_work_that_does_not_get_on_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def told(now_s: float, done: int, doing: str) -> str:
        clock[0] = now_s
        tell(done, 2, doing)
        return capsys.readouterr().err

    with progress.progress(lines=True) as tell:
        assert told(0, 0, "others use the CPU") == ""
        assert told(progress.SILENT_S - 1, 0, "others use the CPU") == ""
        assert told(progress.SILENT_S, 0, "others use the CPU") == "gemmtuned: 0 of 2 done, now: others use the CPU\n"
        assert told(10 * progress.SILENT_S, 0, "others use the CPU") == ""
        assert told(10 * progress.SILENT_S, 1, "bf16:8x64x64") == ""
        assert told(10 * progress.SILENT_S + 1, 1, "bf16:8x64x128") == ""
    with progress.progress() as tell:
        assert told(20 * progress.SILENT_S, 1, "x") == told(30 * progress.SILENT_S, 1, "x") == ""
    with progress.progress(steady=True) as tell:
        assert told(30 * progress.SILENT_S, 0, "round 1: off") == ""
        assert told(31 * progress.SILENT_S - 1, 1, "round 1: on") == ""
        assert told(31 * progress.SILENT_S, 2, "round 2: on") == "gemmtuned: 2 of 2 done, now: round 2: on\n"
        assert told(31 * progress.SILENT_S + 1, 3, "round 2: off") == ""


def test_environments_are_told_by_device_torch_and_what_differs() -> None:
    shared = "cpu-x torch=2.11 torch_mv=2.11"
    old, new = f"{shared} onednn=2.11/cpu-x", f"{shared} onednn=2.12/cpu-x"
    assert abridged([old]) == {old: "cpu-x torch=2.11"}
    assert abridged([old, new, "cuda-y torch=2.11 triton=3.6"]) == {
        old: "cpu-x torch=2.11 onednn=2.11",
        new: "cpu-x torch=2.11 onednn=2.12",
        "cuda-y torch=2.11 triton=3.6": "cuda-y torch=2.11",
    }
    assert abridged(["strange", shared]) == {"strange": "strange", shared: "cpu-x torch=2.11"}
    twice = [f"{shared} onednn={stamp}" for stamp in ("a", "a/cpu-x")]
    assert abridged(twice) == {key: key for key in twice}, "short forms must tell them apart"


def test_status_says_how_the_environment_that_waits_differs_from_the_daemons() -> None:
    theirs, ours = "cuda-y torch=2.11 triton=3.6", "cuda-y torch=2.11 triton=3.7"
    place = {
        "environment": theirs, "device": "cuda-y", "problems": 3, "calls": 9,
        "open_problems": 3, "failed": 0, "stale": 0,
        "put_off": 0, "put_off_reason": None, "last_seen": 0,
    }  # fmt: skip
    notice = {
        "running": True, "state": "ready", "reason": "", "pid": 1, "solved": 0, "seats": [], "environment": ours,
        "owner": owner_name(), "updated_s": time.time(), "elsewhere": [{"environment": theirs, "problems": 3}],
    }  # fmt: skip
    said = status_report(
        Settings.from_env({}), notice=notice, published=None, generation=0, sessions=[], covered_time=(0.0, 0.0),
        environments=[place], saved_us=0.0, now_s=time.time(),
    )  # fmt: skip
    assert said.notes == [
        "for a daemon of another environment: 3 problems. Start one there: cuda-y torch=2.11 triton=3.6"
    ]
