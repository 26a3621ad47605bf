"""NVML, asked in a process of its own: a wounded driver can hang its caller for ever, and must not hang the daemon.

Reads nothing but line ends from standard input; answers each with one JSON line about every GPU.  The only file that
calls NVML.  What a GPU does not say is null.

The worker, which its parent can kill, asks `condition_of` in its own process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from gemmtuned.daemon.device.sampler import serve

_SAMPLE_US: Final = 1_000_000  # how far back samples are asked for: the driver takes a few a second
_BASELINE_BYTES: Final = 128 << 20  # used on a card nobody uses: 2 to 32 MiB; a CUDA context takes more than 200
_BASELINE_V1_BYTES: Final = 700 << 20  # the same, with the driver's own share


def main() -> None:
    """Answer until standard input ends."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as err:
        sys.stdout.write(json.dumps({"error": f"NVML is not usable: {err}"}) + "\n")
        return
    serve(lambda: answer(pynvml))


def answer(nvml: Any) -> dict[str, Any]:
    """Facts of every GPU, or why there are none."""
    try:
        return {"gpus": [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]}
    except nvml.NVMLError as err:
        return {"error": f"NVML failed: {err}"}


def condition_of(uuid: str) -> tuple[int | None, int | None]:
    """(SM clock in MHz, reasons why it is not higher, as NVML's bits) of one GPU now; None for what it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()  # counts its callers: a second time costs nothing
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no NVML, or not for us: the race goes on without
        return None, None

    def ask(question: Callable[[], Any]) -> int | None:
        try:
            return int(question())
        except pynvml.NVMLError:
            return None

    return (
        ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    )


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    # version 2 leaves out what the driver keeps for itself (0.6 GiB on an H100), so that little use means nobody
    exact = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    memory = exact or ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    utilization = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    mig = ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    capability = ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return {
        "index": index,
        "uuid": uuid,
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "arch": f"sm_{capability[0]}{capability[1]}" if capability else None,
        "units": ask(lambda: nvml.nvmlDeviceGetNumGpuCores(handle)),
        "util": utilization.gpu / 100 if utilization else None,
        "peak": _peak(nvml, handle),
        "used_bytes": memory.used if memory else None,
        "free_bytes": memory.free if memory else None,
        "baseline_bytes": _BASELINE_BYTES if exact else _BASELINE_V1_BYTES,
        "pids": [p.pid for p in processes] if processes is not None else None,
        "held_by_pid": {str(p.pid): p.usedGpuMemory for p in processes or () if p.usedGpuMemory},
        "by_pid": _by_pid(nvml, handle),
        "compute_mode": ask(lambda: nvml.nvmlDeviceGetComputeMode(handle)),
        "mig": mig == 1,
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
    }


def _peak(nvml: Any, handle: Any) -> float | None:
    """Largest utilisation of a sample of the last second, 0 to 1: `util` is the last sample alone, 1/6 s long at least.

    None when the driver does not say.
    """
    since_us = time.time_ns() // 1000 - _SAMPLE_US
    try:
        kind, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, since_us)
    except nvml.NVMLError:
        return None
    if kind != nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return None
    percent = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp >= since_us]
    return min(max(percent, default=0) / 100, 1.0)


def _by_pid(nvml: Any, handle: Any) -> dict[str, int] | None:
    """Largest SM utilisation by process in percent over the last second; None when the driver does not say."""
    since_us = time.time_ns() // 1000 - _SAMPLE_US
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except nvml.NVMLError_NotFound:
        return {}  # nobody computed
    except nvml.NVMLError:
        return None
    out: dict[str, int] = {}
    for sample in samples:
        # Older samples come back, too: the last one of a program that is quiet now, ten seconds later (seen, 580.159).
        # Process 0 is one of which the driver may not tell us
        if sample.pid and sample.timeStamp >= since_us:
            out[str(sample.pid)] = max(out.get(str(sample.pid), 0), sample.smUtil)
    return out


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
