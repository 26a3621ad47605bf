"""GPUs as devices to tune on: what others do there, by the driver's own library.

What is not known counts as busy, with the reason: no answer, MIG, MPS, exclusive modes, memory that others hold
(a loaded server that is quiet right now is still somebody's).  Whose use it is that the driver reports, ours or
others', decides attribution.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

from gemmtuned.configs.solution import Device, slug
from gemmtuned.daemon.device.attribution import Attribution, OwnUse, Watch, pids
from gemmtuned.daemon.device.idle import Limits, Reading
from gemmtuned.daemon.device.mps import Mps
from gemmtuned.daemon.device.neighbours import Neighbours
from gemmtuned.daemon.device.sampler import Facts, Sampler

MEMORY_CAP_BYTES: Final = 3 << 29  # 1.5 GiB: what a worker's tensors may always take beside a loaded program
NEEDED_BYTES: Final = MEMORY_CAP_BYTES + (1 << 29)  # and its context
SOURCES: Final = {"nvml_child": "pynvml", "amdsmi_child": "amdsmi"}  # and the Python module that each needs
_MODES: Final = {1: "exclusive", 2: "prohibited", 3: "exclusive"}  # NVML_COMPUTEMODE_*


class GpuMonitor:
    """One GPU; see daemon/device/devices.py: Monitor. share_resident: tune beside a loaded program that is quiet."""

    def __init__(
        self,
        sampler: Sampler,
        facts: Facts,
        *,
        share_resident: bool = False,
        neighbours: Watch = lambda least, elsewhere: None,
        mps: Callable[[], str | bool] = lambda: False,
    ) -> None:
        self._sampler = sampler
        self._attribution = Attribution(share_resident=share_resident, neighbours=neighbours)
        self._mps = mps
        self._last_s: float | None = None
        self.pids: Sequence[int] = ()
        self.cpus: Sequence[int] = ()
        self.id = str(facts["uuid"])
        kind = facts.get("prefix", "cuda")
        self.name = f"{kind}:{facts['index']}"
        self.conditions = f"driver {facts['driver']}" if facts.get("driver") else ""
        units = sm_count(facts)
        self._device = Device(
            key=f"{kind}-{slug(facts['name'], 40)}-{units}",
            kind=kind,
            name=facts["name"],
            arch=facts["arch"] or "unknown",
            units=units,
        )

    @property
    def device(self) -> Device:
        return self._device

    @property
    def limits(self) -> Limits:
        return Limits(clear=0.0, busy=0.01, free_bytes=NEEDED_BYTES)

    def read(self, now_s: float, own: OwnUse | None = None) -> Reading:
        every = self._sampler.facts()
        facts = every.get(self.id)
        since_s, self._last_s = self._last_s if self._last_s is not None else now_s, now_s
        if facts is None:
            self._last_s = None
            return Reading(now_s, now_s, None, None, self._sampler.error or f"{self.id} is gone")
        self.pids = sorted(int(pid) for pid in pids(facts) if pid.isdigit())
        forbidden = self._forbidden(facts)
        if forbidden:
            others, note = None, forbidden
        else:
            elsewhere = {pid for id_, gpu in every.items() if id_ != self.id for pid in pids(gpu)}
            others, note = self._attribution.others(facts, own, now_s, elsewhere=elsewhere)
        if not 0 < now_s - since_s <= 60:
            since_s = now_s - 1e-6
        # with our worker on it the question of room has been answered
        return Reading(since_s, now_s, others, None if own else facts["free_bytes"], note)

    def _forbidden(self, facts: Facts) -> str:
        if facts["mig"]:
            return "MIG is on: slices share clocks and bandwidth, we stay away"
        mode = _MODES.get(facts["compute_mode"] or 0)
        if mode:
            return f"the GPU is in {mode} mode (nvidia-smi -c): a second program may not use it"
        mps = self._mps()
        if mps:
            seen = f" ({mps})" if isinstance(mps, str) else ""
            return f"MPS is running{seen}: a fault in one of its clients ends all of them, we stay away"
        return ""


def sm_count(facts: Facts) -> int:
    """Streaming multiprocessors: NVML counts cores, 128 on each SM from sm_86 on and on sm_90, 64 on sm_80."""
    cores = facts.get("units")
    if not cores:
        return 0
    if facts.get("prefix", "cuda") != "cuda":
        return int(cores)
    return int(cores) // (64 if facts.get("arch") in ("sm_70", "sm_75", "sm_80") else 128)


def find_gpus(*, share_resident: bool = False) -> list[GpuMonitor]:
    """A monitor for each GPU of this machine, in the driver's order; none without a driver's library."""
    neighbours, mps = Neighbours(), Mps()
    found: list[GpuMonitor] = []
    for source, module in SOURCES.items():
        if find_spec(module) is None:
            continue
        sampler = Sampler(source)
        gpus = sampler.wait()
        if not gpus:
            sampler.close()
        found += [
            GpuMonitor(sampler, facts, share_resident=share_resident, neighbours=neighbours.busy, mps=mps.seen)
            for facts in gpus.values()
        ]
    return found
