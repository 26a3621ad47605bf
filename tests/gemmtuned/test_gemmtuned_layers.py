"""By layer: all M of one weight in a row, by N and K on the command line and by module names in Python."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from store_cases import HOUR, NEW, found, open_store, problem, saw
from typer.testing import CliRunner

import gemmtuned
from gemmtuned.cli import build
from gemmtuned.reports.of_model import patterns
from gemmtuned.reports.render import against_stock


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """1024x512 twice as fast at M = 8 and four times through a bucket at M = 70, 64x512 best on torch at M = 8."""
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    store = open_store(tmp_path)
    seen = [saw(problem(), 100, us=10.0), saw(problem(m=70), 50, us=20.0), saw(problem(n=64), 50, us=4.0)]
    store.sightings.add("serve", NEW, [*seen, saw(problem(m=9, n=64), 50, us=4.0)], now_s=time.time() - HOUR)
    best = found(problem(n=64), backend="torch", config="", state="default_best", us=4.0, baseline_us=4.0)
    padded = found(problem(m=80), covers="fine", us=5.0, baseline_us=20.0)
    for solution in (found(problem()), padded, best):
        store.solutions.install(None, [solution], environment=NEW, now_s=time.time() - HOUR)
    store.close()
    return tmp_path


def test_coverage_by_layer_sums_all_m_and_tells_three_answers_apart(home: Path) -> None:
    done = CliRunner().invoke(build(), ["coverage", "--by", "layer", "--json"])
    said = json.loads(done.stdout)
    wide, narrow = said["rows"]

    assert (wide["layer"], wide["m"], wide["calls"]) == ("1024x512 fp32, 2 threads", "8 to 70 (2 sizes)", 150)
    assert wide["stock_us"] == pytest.approx(100 * 10 + 50 * 20)
    assert wide["now_us"] == pytest.approx(100 * 5 + 50 * 5)
    assert (wide["faster"], wide["best"], wide["none"]) == (1, 0, 0)
    assert (narrow["faster"], narrow["best"], narrow["none"]) == (0, 0.5, 0.5)
    assert said["total"]["gain"] == pytest.approx(2400 / 1150)


def test_text_names_what_it_is_a_share_of(home: Path) -> None:
    text = CliRunner().invoke(build(), ["coverage", "--by", "layer"]).stdout

    assert "GEMM time of the last 24 h: 2.09x faster than on stock torch" in text
    assert "torch is best" in text and "no verdict" in text


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(512, 1024)
        self.gate = torch.nn.Linear(512, 1024)
        self.out = torch.nn.Linear(7, 5)


def test_layers_of_a_model_have_their_names(home: Path) -> None:
    model = torch.nn.Sequential(*(Block() for _ in range(3)), torch.nn.Linear(512, 64))
    seen = gemmtuned.layers(model)

    assert [patterns(row["modules"]) for row in seen] == [["*.up (3)", "*.gate (3)"], ["3"]]
    assert seen.unseen == ("0.out", "1.out", "2.out")
    assert seen.gain == pytest.approx(2400 / 1150)
    assert "*.up (3), *.gate (3)" in str(seen) and "not called yet, or not recorded: *.out (3)" in str(seen)
    assert "<td>1024x512</td>" in seen._repr_html_()


def test_hostile_names_are_text_in_a_notebook(home: Path) -> None:
    model = torch.nn.Module()
    model.add_module("<script>alert(1)</script>", torch.nn.Linear(512, 64))

    assert "<script>" not in gemmtuned.layers(model)._repr_html_()


def test_numbers_within_a_name_stay() -> None:
    assert patterns(["h.0.fc1", "h.1.fc1", "h.0.fc2", "head"]) == ["h.*.fc1 (2)", "h.0.fc2", "head"]


class Conv1D(torch.nn.Module):
    """As transformers has it for GPT-2: W lies as [K, N]."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.nf, self.nx = n, k
        self.weight = torch.nn.Parameter(torch.zeros(k, n))


def test_weights_that_are_no_linear_layer_have_names_too(home: Path) -> None:
    attention = torch.nn.MultiheadAttention(64, 4, kdim=512, vdim=32)
    attention.q_proj_weight = torch.nn.Parameter(torch.zeros(1024, 512))
    seen = gemmtuned.layers(torch.nn.ModuleDict({"attn": attention, "fc": Conv1D(64, 512)}))

    assert {(row["n"], row["k"]): row["modules"] for row in seen} == {
        (1024, 512): ["attn.q_proj_weight"],
        (64, 512): ["attn.k_proj_weight", "fc"],
    }
    assert seen.unseen == ("attn.v_proj_weight", "attn.out_proj")
    assert list(seen.frame()["modules"]) == [row["modules"] for row in seen]


@pytest.mark.parametrize(("gain", "told"), [(1.0, "as on"), (1.004, "as on"), (1.02, "1.02x faster than on")])
def test_a_gain_that_two_digits_do_not_show_is_not_called_faster(gain: float, told: str) -> None:
    assert against_stock(gain) == f"{told} stock torch"
