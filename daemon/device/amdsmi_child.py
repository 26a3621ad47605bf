"""AMD's library, asked in a process of its own, with the same answers as nvml_child.py.

Written from AMD's documentation and tested against a stand-in for it; it has not run on hardware yet.  What
a GPU does not say (the library answers "N/A") is null, and null is busy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

from gemmtuned.daemon.device.sampler import serve

_BASELINE_BYTES: Final = 512 << 20  # what driver and firmware hold on a card nobody uses


def main() -> None:
    """Answer until standard input ends."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
    except Exception as err:
        sys.stdout.write(json.dumps({"error": f"amdsmi is not usable: {err}"}) + "\n")
        return
    serve(lambda: answer(amdsmi))


def answer(smi: Any) -> dict[str, Any]:
    """Facts of every GPU, or why there are none."""
    try:
        return {"gpus": [_gpu(smi, index, handle) for index, handle in enumerate(smi.amdsmi_get_processor_handles())]}
    except smi.AmdSmiException as err:
        return {"error": f"amdsmi failed: {err}"}


def _gpu(smi: Any, index: int, handle: Any) -> dict[str, Any]:
    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except smi.AmdSmiException:
            return None

    def number(facts: Any, name: str) -> float | None:
        value = facts.get(name) if isinstance(facts, dict) else None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    asic = ask(lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    activity = number(ask(lambda: smi.amdsmi_get_gpu_activity(handle)), "gfx_activity")
    memory = ask(lambda: smi.amdsmi_get_gpu_vram_usage(handle))
    used, total = number(memory, "vram_used"), number(memory, "vram_total")  # MiB
    processes = ask(lambda: smi.amdsmi_get_gpu_process_list(handle))
    partition = ask(lambda: smi.amdsmi_get_gpu_compute_partition(handle))
    driver = ask(lambda: smi.amdsmi_get_gpu_driver_info(handle)) or {}
    arch = str(asic.get("target_graphics_version", "")).partition(":")[0]
    return {
        "prefix": "rocm",
        "index": index,
        "uuid": f"rocm:GPU-{_serial(asic, index)}",
        "name": str(asic.get("market_name", "AMD GPU")),
        "arch": arch if arch.startswith("gfx") else None,
        "units": number(asic, "num_compute_units"),
        "util": activity / 100 if activity is not None else None,
        "peak": None,
        "used_bytes": int(used) << 20 if used is not None else None,
        "free_bytes": int(total - used) << 20 if used is not None and total is not None else None,
        "baseline_bytes": _BASELINE_BYTES,
        "pids": [p["pid"] for p in processes] if processes is not None else None,
        "held_by_pid": {},
        # occupancy of each is documented as wrong when asked more than once a second
        "by_pid": None,
        "compute_mode": 0,
        "mig": partition not in (None, "SPX", "N/A"),  # a card cut in parts
        "driver": str(driver.get("driver_version", "")),
    }


def _serial(asic: dict[str, Any], index: int) -> str:
    """As ROCR_VISIBLE_DEVICES names the card: 16 hexadecimal digits; its number where there is no serial."""
    text = str(asic.get("asic_serial", "")).lower().removeprefix("0x")
    return text.rjust(16, "0") if text and text != "n/a" else str(index)


if __name__ == "__main__":
    main()
