"""Every reason the daemon gives for not tuning comes with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import MIB, Card, FakeSampler

from gemmtuned.daemon.device.advice import advice
from gemmtuned.daemon.device.attribution import Attribution
from gemmtuned.daemon.device.gpus import GpuMonitor
from gemmtuned.daemon.device.idle import Limits, Reading, idleness_of
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.reports import checks_host
from gemmtuned.reports.checks_host import _gpus

LIMITS = Limits(clear=0.1, busy=0.25, free_bytes=512 * MIB)


def reason(*readings: Reading, now_s: float = 10.0) -> str:
    return idleness_of(readings, now_s=now_s, window_s=10.0, limits=LIMITS).reason


@pytest.mark.parametrize(
    "text",
    [
        reason(),
        reason(Reading(9, 10, 0.5)),
        reason(Reading(9, 10, None)),
        reason(Reading(9, 10, 0.0), now_s=30.0),
        reason(Reading(9, 10, 0.0, 100 * MIB)),
        reason(Reading(9, 10, 0.0)),
        reason(Reading(1, 10, 0.0)),
    ],
)
def test_reasons_of_the_idle_rule(text: str) -> None:
    assert advice(text), text


@pytest.mark.parametrize(
    ("card", "mps"),
    [
        (Card(more={"mig": True}), False),
        (Card(more={"compute_mode": 2}), False),
        (Card(more={"compute_mode": 3}), False),
        (Card(more={"util": None}), False),
        (Card(), True),
    ],
)
def test_reasons_of_a_gpu(card: Card, mps: bool) -> None:
    monitor = GpuMonitor(FakeSampler(card), card.facts(), mps=lambda: mps)  # type: ignore[arg-type]
    note = monitor.read(1.0).note
    assert advice(note), note
    monitor._sampler.cards = ()  # type: ignore[attr-defined]
    assert advice(monitor.read(2.0).note)


def test_reasons_of_attribution() -> None:
    card = Card(view="none")
    server = card.start(1, held=9000 * MIB)
    alone, beside = Attribution(), Attribution(share_resident=True, neighbours=lambda least, elsewhere: "")
    blind = Attribution(share_resident=True)
    notes = [a.others(card.facts(), None, 1.0)[1] for a in (alone, blind)]
    server.share = 0.5
    notes.append(beside.others(card.facts(), None, 1.0)[1])
    for note in notes:
        assert note and advice(note), note


@pytest.mark.parametrize(
    "text",
    [
        "paused",
        "paused until 12:00",
        "outside the hours allowed (22-6)",
        "today's budget of 60 s of device time is spent",
        "another gemmtuned daemon tunes on it: pid 1, home /h, since 2026-01-01 00:00:00",
        "worker 12 cannot be killed: it is stuck in a driver of GPU-1",
        "worker ended with exit code 1 while starting: boom; next start from 12:30:10 on",
        "gave way 4 times in a row without a result: waits longer",
        "nothing to tune",
        "the worker is starting",
        "the memory of our own worker is not back yet",
        "process 12 came to the GPU",
        "process 12, which holds the GPU, works",
        "GPU monitor: no answer from the driver for 5 s",
        "GPU monitor: the child that asks the driver ended without an answer",
        "/h/tune.db: locked by others for 0.5 s",
        "CPU counters cannot be read (denied)",
    ],
)
def test_reasons_of_seats_rules_and_the_store(text: str) -> None:
    assert advice(text), text


def test_a_gpu_without_the_library_to_ask_its_driver_is_named_by_doctor(tmp_path: Path) -> None:
    assert list(_gpus(tmp_path)) == []
    (tmp_path / "kfd").touch()
    (check,) = _gpus(tmp_path)
    assert check.fix == "pip install amdsmi"


def test_no_reason_needs_no_advice() -> None:
    assert advice("") == ""


def test_a_gpu_without_the_compiler_of_our_kernels_is_named_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(checks_host, "find_spec", lambda name: None if name == "triton" else object())
    (check,) = _gpus(tmp_path)
    assert (check.result, check.fix) == ("WARN", "pip install triton")
    monkeypatch.setattr(checks_host, "find_spec", lambda name: object())
    assert list(_gpus(tmp_path)) == []
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    (check,) = _gpus(tmp_path)
    assert (check.result, check.fix) == ("WARN", "pip install nvidia-cuda-nvrtc")


def test_a_device_that_others_may_use_for_ever_comes_with_what_can_be_done_now() -> None:
    what = advice(reason(Reading(9, 10, 0.98, note="train.py 11195")))
    assert "kill -STOP" in what and "gemmtuned tune" in what
    assert "--idle-s" in advice("gave way 4 times in a row without a result: waits longer")
