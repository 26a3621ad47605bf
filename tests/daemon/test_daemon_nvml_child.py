"""What the driver says is taken for what it is: samples of long ago are not use of now, and silence is not zero."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gemmtuned.daemon.device import nvml_child


class FakeNvml:
    """nvmlDeviceGetProcessUtilization as an H200 answered it (driver 580.159): older samples than asked for, too."""

    class NVMLError(Exception): ...

    class NVMLError_NotFound(NVMLError): ...

    def __init__(self, samples: list[Any] | Exception) -> None:
        self.samples = samples

    def nvmlDeviceGetProcessUtilization(self, handle: object, since_us: int) -> list[Any]:
        if isinstance(self.samples, Exception):
            raise self.samples
        return self.samples


def sample(pid: int, percent: int, age_s: float) -> Any:
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=time.time_ns() // 1000 - int(age_s * 1e6))


def test_only_the_last_second_counts_and_the_largest_share_in_it() -> None:
    samples = [sample(7, 30, 0.9), sample(7, 20, 0.1), sample(8, 2, 10.0), sample(0, 50, 0.1)]

    assert nvml_child._by_pid(FakeNvml(samples), None) == {"7": 30}


@pytest.mark.parametrize(
    ("error", "seen"), [(FakeNvml.NVMLError_NotFound(), {}), (FakeNvml.NVMLError("not supported"), None)]
)
def test_nobody_computed_is_told_from_the_driver_does_not_say(error: Exception, seen: object) -> None:
    assert nvml_child._by_pid(FakeNvml(error), None) == seen


@pytest.mark.parametrize(
    ("samples", "seen"),
    [
        ([(30, 0.9), (2, 0.1), (90, 3.0)], 0.3),  # older samples than asked for come back, too
        ([], 0.0),
        (FakeNvml.NVMLError("not supported"), None),
    ],
)
def test_the_busiest_sample_of_the_last_second_is_told(samples: Any, seen: float | None) -> None:
    class Samples(FakeNvml):
        NVML_GPU_UTILIZATION_SAMPLES = NVML_VALUE_TYPE_UNSIGNED_INT = 1

        def nvmlDeviceGetSamples(self, handle: object, kind: int, since_us: int) -> tuple[int, list[Any]]:
            if isinstance(self.samples, Exception):
                raise self.samples
            return 1, [
                SimpleNamespace(
                    sampleValue=SimpleNamespace(uiVal=percent), timeStamp=time.time_ns() // 1000 - int(age_s * 1e6)
                )
                for percent, age_s in self.samples
            ]

    assert nvml_child._peak(Samples(samples), None) == seen


class FakeCard:
    """The other questions, for one card: whatever is not set is not supported."""

    class NVMLError(Exception): ...

    class NVMLError_NotFound(NVMLError): ...

    nvmlMemory_v2 = 2
    NVML_GPU_UTILIZATION_SAMPLES = 1

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": 1, "nvmlDeviceGetUUID": "GPU-1", "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlSystemGetDriverVersion": "580.1", "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30, free=1),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=7, usedGpuMemory=3 << 30), SimpleNamespace(pid=8, usedGpuMemory=None),
            ],
        }  # fmt: skip
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(*arguments: Any, **options: Any) -> Any:
            if name not in answers:
                raise self.NVMLError(name)
            return answers[name]

        return ask


def test_memory_is_told_by_process_where_the_driver_counts_it() -> None:
    facts = nvml_child._gpu(FakeCard(), 0)

    assert facts["held_by_pid"] == {"7": 3 << 30} and facts["pids"] == [7, 8]
    assert facts["used_bytes"] == 5 << 30 and facts["util"] is None and facts["by_pid"] is None
