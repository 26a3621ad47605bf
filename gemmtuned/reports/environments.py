"""Environments as people tell them apart: the device, torch's version, and what else differs between those shown.

A key names the stamp of every backend, two hundred characters of which all but a few say the same thing again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from gemmtuned.configs.solution import DEFAULT_BACKEND

_STAMP: Final = re.compile(r" (?=[A-Za-z0-9_.:+-]+=)")


def abridged(keys: Iterable[str]) -> dict[str, str]:
    """Environment.key -> its short form, one for each; a key that is no such thing stays as it is."""
    parts = {key: _STAMP.split(key) for key in dict.fromkeys(keys)}
    short = {}
    for key, (device, *stamps) in parts.items():
        near = [set(other[1:]) for other in parts.values() if other[0] == device]
        common = set.intersection(*near)
        shown = [one for one in stamps if one.startswith(f"{DEFAULT_BACKEND}=") or one not in common]
        short[key] = " ".join([device, *(one.replace(f"/{device}", "") for one in shown)])
    distinct = len(set(short.values())) == len(short)
    return short if distinct else {key: key for key in parts}
