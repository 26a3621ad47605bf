"""What the daemon's workers do without: pieces of other packages that ended one, and what is broken or unwanted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gemmtuned.configs.human_units import moment
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats.left_out import FILE, read
from gemmtuned.kernels.other_packages import is_named
from gemmtuned.reports.checks import WARN, Check


def checks(settings: Settings) -> Iterator[Check]:
    """One line for each piece that ended a worker and is still installed as it was then."""
    now_s = time.time()
    for one in read(settings.home):
        if not one.holds(now_s) or any(is_named(one.package, name) for name in settings.without):
            continue
        package = " ".join(filter(None, (one.package or "a package", one.version)))
        found = (
            f"{one.piece} of {package} ended a worker ({one.how}) {moment(one.at_s, now_s)}: it is not tried again "
            "with this version, and all other backends go on"
        )
        if one.doubtful:
            found = found.replace("with this version", "for a day")
        fix = "install another version of it" + (f", or set GEMMTUNED_WITHOUT={one.package}" if one.package else "")
        fix += f"; to have it tried again: rm {settings.home / FILE}"
        yield Check("other packages", WARN, found, fix)


def notes(seats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each backend, family or entry point that a worker does without."""
    names: dict[str, list[str]] = {}
    for seat in seats:
        for line in seat["left_out"]:
            names.setdefault(str(line), []).append(seat["name"])
    for line, devices in names.items():
        yield f"The worker of {', '.join(devices)} does without {line}."
