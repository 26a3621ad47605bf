"""Which CPU this is: read from the system's own file, whatever the program has made of its functions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from gemmtuned.configs import solution
from gemmtuned.configs.solution import cpu_device

ARM = "processor\t: 0\nFeatures\t: fp asimd\n\nprocessor\t: 1\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize("cpuinfo", [ARM, None], ids=["Arm", "no /proc"])
def test_a_cpu_without_a_name_is_called_by_its_kind_and_no_process_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None
) -> None:
    def start(*command: object, **options: object) -> NoReturn:
        raise AssertionError(f"a child of the program: {command}")

    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(solution, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "_uname_cache", None)
    monkeypatch.setattr(subprocess, "check_output", start)
    device = cpu_device()

    assert device.name == platform.machine()
    assert device.units == (1 if cpuinfo is None else 2)


def test_files_that_a_program_has_made_up_make_no_other_cpu_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu_device()
    monkeypatch.setattr(Path, "read_text", lambda self, *given, **options: "")
    monkeypatch.setattr(Path, "is_file", lambda self: False)

    assert cpu_device() == real
