"""What a seat knows of its device: the readings of the last while, and whether it is idle or wanted by others."""

from __future__ import annotations

from collections import deque
from typing import Final

from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.devices import Monitor
from gemmtuned.daemon.device.idle import Idleness, Mean, Reading, idleness_of, must_yield
from gemmtuned.daemon.timer import Timer

PUT_OFF_S: Final = 30.0  # after an answer that says: not now
LONGEST_WAIT_S: Final = 600.0  # after yields that gained nothing


class View:
    """Looks at one device. always: it counts as idle, whatever others do."""

    def __init__(self, monitor: Monitor, *, window_s: float, always: bool) -> None:
        self.idleness = Idleness("busy", 0.0, "no reading yet")
        self._monitor, self._window_s, self._always = monitor, window_s, always
        self._readings: deque[Reading] = deque()

    @property
    def others(self) -> float | None:
        """What others used of it at the last look; None before the first."""
        return self._readings[-1].others if self._readings else None

    def look(self, now_s: float, own: OwnUse | None, meanwhile: Mean | None) -> None:
        """Take a reading. own: what is ours of the use; meanwhile: gets a new one added, while a worker measures."""
        reading = self._monitor.read(now_s, own)
        if not self._readings or self._readings[-1] is not reading:
            self._readings.append(reading)
            if meanwhile is not None:
                meanwhile.add(reading)
        while len(self._readings) > 1 and not now_s - self._window_s - 5 <= self._readings[0].at_s <= now_s + 5:
            self._readings.popleft()  # too old to matter, or from before the clock was set back
        if self._always:
            self.idleness = Idleness("idle", self._window_s)
        else:
            limits = self._monitor.limits
            self.idleness = idleness_of(self._readings, now_s=now_s, window_s=self._window_s, limits=limits)

    def must_yield(self, now_s: float) -> str:
        """Why whoever is at the device must leave it; "" when nobody wants it."""
        return "" if self._always else must_yield(self._readings, now_s=now_s, limits=self._monitor.limits)


class Patience:
    """How long a device is let alone that others take back again and again before anything is done."""

    def __init__(self, window_s: float) -> None:
        self.fruitless = 0  # yields in a row without a verdict between them
        self._window_s = window_s
        self._again = Timer(LONGEST_WAIT_S)

    def waits(self, now_s: float) -> bool:
        """Whether it is let alone now."""
        return not self._again.is_due(now_s)

    def put_off(self, now_s: float) -> None:
        """The worker has said: not now."""
        self._again.wait_until(now_s + PUT_OFF_S)

    def gave_way(self, now_s: float) -> None:
        """One more yield: it is asked for less and less often."""
        if self.fruitless > 1:  # once or twice is chance
            wait_s = min(self._window_s * 2.0 ** (self.fruitless - 1), LONGEST_WAIT_S, 60 * self._window_s)
            self._again.wait_until(now_s + wait_s)
        self.fruitless = min(self.fruitless + 1, 16)

    def gained(self) -> None:
        """A verdict was installed."""
        self.fruitless = 0
