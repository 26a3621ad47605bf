"""Long matrices of parameters: `make test` runs the named part of each, `make soak` all the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def matrix(every: Iterable[Any], now: Iterable[Any]) -> list[Any]:
    """All parameters, of which those in `now` run in `make test` and the others in `make soak`."""
    wanted = list(now)
    found = list(every)
    missing = [one for one in wanted if one not in found]
    assert not missing, f"not among the parameters: {missing}"
    return [one if one in wanted else _long(one) for one in found]


def _long(one: Any) -> Any:
    values = one if isinstance(one, tuple) else (one,)
    return pytest.param(*values, marks=pytest.mark.soak)
