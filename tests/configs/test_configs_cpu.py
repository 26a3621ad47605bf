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


def test_a_cpu_that_libraries_are_to_use_otherwise_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**variables: str) -> str:
        with monkeypatch.context() as setting:
            for name, value in variables.items():
                setting.setenv(name, value)
            return cpu_device().key

    real = key()
    others = [
        key(ONEDNN_MAX_CPU_ISA="AVX2"), key(ONEDNN_MAX_CPU_ISA="SSE41"), key(MKL_CBWR="AVX2"),
        key(MKL_CBWR="AVX2", ONEDNN_MAX_CPU_ISA="AVX2"), key(DNNL_DEFAULT_FPMATH_MODE="BF16"),
        key(ATEN_CPU_CAPABILITY="default"), key(MKL_CBWR="\x1b[31m\n" * 99), key(MKL_CBWR="\x1b[32m\n" * 99),
    ]  # fmt: skip

    assert len({real, *others}) == 1 + len(others)
    assert others[0].endswith("-onednn-max-cpu-isa-avx2")
    assert all(len(other) < 120 and other.isprintable() for other in others)
    assert key(DNNL_MAX_CPU_ISA="avx2") == key(ONEDNN_MAX_CPU_ISA="AVX2", DNNL_MAX_CPU_ISA="SSE41") == others[0]
    assert key(ONEDNN_MAX_CPU_ISA="ALL") == key(MKL_CBWR="") == key(ONEDNN_DEFAULT_FPMATH_MODE="STRICT") == real


def test_files_that_a_program_has_made_up_make_no_other_cpu_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu_device()
    monkeypatch.setattr(Path, "read_text", lambda self, *given, **options: "")
    monkeypatch.setattr(Path, "is_file", lambda self: False)

    assert cpu_device() == real
