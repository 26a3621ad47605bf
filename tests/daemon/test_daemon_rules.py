"""What the operator allows, and who may use a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import FakeMonitor

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.service.rules import PAUSED, Hours, Rules, allowed

DAY = 86400.0


def test_hours_may_run_over_midnight_and_be_several() -> None:
    night = Hours.parse("22-6")
    assert [night.allow(h * 60) for h in (21, 22, 0, 5, 6, 12)] == [False, True, True, True, False, False]
    lunch = Hours.parse("12:30-13, 20-24")
    assert [lunch.allow(m) for m in (749, 750, 779, 780, 1200, 1439)] == [False, True, True, False, True, True]


@pytest.mark.parametrize("text", ["", "22", "22-", "25-6", "6-6", "22-6;", "a-b", "24:30-6", "1-2,"])
def test_hours_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="hours"):
        Hours.parse(text)


def test_a_restart_does_not_begin_the_budget_anew(tmp_path: Path) -> None:
    def rules(budget_s: float | None = 100.0) -> Rules:
        made = Rules(budget_s=budget_s, day_of=lambda now_s: int(now_s // DAY))
        made.remember(tmp_path)
        return made

    first = rules()
    for second in range(60):
        first.spend(second, 1.0)
        first.keep(tmp_path)
    first.keep(tmp_path, now=True)
    second = rules()
    assert second.used_s(61.0) == 60.0 and not second.is_spent(61.0)
    second.spend(62.0, 40.0)
    second.keep(tmp_path)
    assert rules().is_spent(63.0) and not rules().is_spent(DAY + 1.0)
    free = rules(None)
    assert free.why_not(63.0, tmp_path) == "" and free.used_s(63.0) == 100.0
    free.spend(64.0, 20.0)
    free.keep(tmp_path)
    assert rules(110.0).is_spent(65.0), "time without a budget counts, too"
    for damaged in ("garbage", "0 nan", "0 inf", "0 -5", "0", "0 5_0", "0 \u0665", "\u0660 5", "-0 5"):
        (tmp_path / "budget").write_text(damaged)
        assert rules().used_s(63.0) == 0.0


def test_a_budget_is_for_a_day(tmp_path: Path) -> None:
    rules = Rules(budget_s=100.0, day_of=lambda now_s: int(now_s // DAY))
    rules.spend(0.0, 99.0)
    assert rules.why_not(1.0, tmp_path) == ""
    rules.spend(2.0, 1.0)
    assert "budget of 100 s" in rules.why_not(3.0, tmp_path)
    assert rules.why_not(DAY, tmp_path) == ""


def test_a_pause_ends_by_itself_or_when_told(tmp_path: Path) -> None:
    rules = Rules()
    assert rules.why_not(1000.0, tmp_path) == ""
    (tmp_path / PAUSED).write_text("2000")
    assert "paused until" in rules.why_not(1999.0, tmp_path)
    assert rules.why_not(2000.0, tmp_path) == ""
    (tmp_path / PAUSED).write_text("")
    assert rules.why_not(1e10, tmp_path) == "paused"
    (tmp_path / PAUSED).unlink()
    assert rules.why_not(1000.0, tmp_path) == ""


def test_devices_are_chosen_by_name_or_uuid() -> None:
    monitors = [FakeMonitor(), FakeMonitor(id="GPU-aaaa1111-x", name="cuda:0"), FakeMonitor(id="GPU-b", name="cuda:1")]
    assert [m.name for m in allowed(monitors, ["cuda:1", "cpu"])] == ["cuda:1", "cpu"]
    assert [m.name for m in allowed(monitors, ["GPU-aaaa", "cuda:0"])] == ["cuda:0"]
    with pytest.raises(SettingError, match=r"no device 'cuda:7'.*cuda:1"):
        allowed(monitors, ["cuda:7"])


def test_a_device_has_one_holder_and_its_death_frees_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gemmtuned.daemon.device.device_lock import DeviceLock\n"
        "print(repr(DeviceLock(Path(sys.argv[1]), 'GPU-1', 'pid 7, home /h').take()), flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "''\n"
        mine, elsewhere = DeviceLock(tmp_path, "GPU-1", "me"), DeviceLock(tmp_path, "GPU-2", "me")
        assert "pid 7, home /h, since" in mine.take()
        assert elsewhere.take() == "" == elsewhere.take()
        other.send_signal(signal.SIGKILL)
        other.wait(10)
        assert mine.take() == ""
        assert "me, since" in DeviceLock(tmp_path, "GPU-1", "third").take()
        mine.drop()
        assert DeviceLock(tmp_path, "GPU-1", "third").take() == ""
    finally:
        other.kill()
        other.communicate()


def test_a_lock_file_of_another_user_can_be_held_though_not_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anything")
    DeviceLock(tmp_path, "GPU-1", "them").take()
    next(tmp_path.iterdir()).chmod(0o444)
    assert DeviceLock(tmp_path, "GPU-1", "me").take() == ""


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gemmtuned-gpu-1.lock").symlink_to(tmp_path / "elsewhere")
    assert "GEMMTUNED_DEVICE_LOCKS" in DeviceLock(tmp_path, "GPU-1", "me").take()
    assert not (tmp_path / "elsewhere").exists()


def test_the_folder_of_locks_is_one_for_all_homes() -> None:
    one, two = (Settings.from_env({"GEMMTUNED_HOME": home}).device_locks for home in ("/a", "/b"))
    assert one == two
    assert Settings.from_env({"GEMMTUNED_DEVICE_LOCKS": "/locks"}).device_locks == Path("/locks")
