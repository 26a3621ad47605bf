"""Calls with operands that a solution's kernel does not take: they run without it, and are not covered."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hooked import Home

from gemmtuned.db import queries

PROGRAM = """
    import json, time, torch, gemmtuned
    from hooked import publish, published, wait_for
    from gemmtuned.configs.problem import Problem
    from gemmtuned.db.store import Store
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    wide, w = torch.randn(4, 64), torch.randn(16, 32)
    hook, problem = activate.current(), Problem.parse("fp32:4x16x32,threads=1")
    here = hook.where.environment("cpu")
    row = published(problem, "onednn", stamp=here.stamps["onednn"])
    store = Store(hook.settings.db, locks=hook.settings.locks)
    store.solutions.install(None, [row], environment=here, now_s=time.time())
    publish(hook.settings.config_dir, [row], 1)
    wait_for(lambda: gemmtuned.generation() == 1)
    for _ in range(3):
        torch.nn.functional.linear(wide[:, :32].contiguous(), w)
"""


@pytest.mark.parametrize("sliced", [5, 0])
def test_operands_with_gaps_are_served_by_torch_and_not_called_covered(home: Home, sliced: int) -> None:
    """X is a part of a wider matrix: oneDNN would take a hundred times as long."""
    done = home.run(
        PROGRAM + f"    [torch.nn.functional.linear(wide[:, :32], w) for _ in range({sliced})]\n    print(1)"
    )
    assert done.said == 1, done
    database = home.path / "tune.db"
    [row] = queries.coverage(database, by="problem")
    assert (row["exact_calls"], row["missed_calls"], row["covered_calls"]) == (3, sliced, 3)
    assert (row["tuned_problems"], row["unserved_problems"], row["unserved_calls"]) == (
        int(not sliced),
        sliced // 5,
        sliced,
    )
    found: list[dict[str, Any]] = queries.unfit(database)
    assert [(one["problem"], one["backend"], one["missed"]) for one in found] == [
        ("fp32:4x16x32,threads=1", "onednn", 5)
    ][: sliced // 5]
    assert queries.unraced(database) == [] and queries.frozen(database) == []
    assert all(one["last_seen"] <= time.time() * 1e6 for one in found)
