"""Several ranks: one store that tells them apart, and tables that change on all of them at once or not at all."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

import pytest
from hooked import HERE, Done, Home, publish, published
from ranks_program import ROUTER, STEPS

from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Session
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.reports import status

RUN = f"import runpy; runpy.run_path({str(HERE / 'ranks_program.py')!r}, run_name='__main__')"
Ranks = Callable[..., list[Done]]


@pytest.fixture
def ranks(home: Home) -> Ranks:
    """Runs ranks_program.py with generation 1 published."""
    home.path.mkdir()
    publish(home.path / "configs", [published(ROUTER, "torch_swap")], 1)
    return lambda count, how, **env: home.run_ranks(count, RUN, str(count), how, **env)


def test_ranks_that_reload_at_different_moments_part_at_near_ties(ranks: Ranks) -> None:
    first, second = (done.said for done in ranks(2, "own"))

    # this is what reload(group) is for: the test below would say nothing if kernels rounded alike here
    assert first["generations"] == [1] * 4 + [2] * 8
    assert second["generations"] == [1] * 6 + [2] * 6
    assert [step for step, tokens in enumerate(first["apart"]) if tokens] == [4, 5]


def test_reload_of_the_group_changes_all_ranks_at_one_step(home: Home, ranks: Ranks) -> None:
    said = [done.said for done in ranks(3, "group")]

    assert [one["generations"] for one in said] == [[1] * 5 + [2] * 7] * 3  # and none by itself: WORLD_SIZE is 3
    assert [one["apart"] for one in said] == [[0] * STEPS] * 3
    with sqlite3.connect(home.path / "tune.db") as conn:
        rows = conn.execute("SELECT rank, run, generation, calls FROM sessions ORDER BY rank").fetchall()
    assert rows == [(rank, "test", 2, STEPS) for rank in range(3)]


def test_ranks_that_step_together_hold_one_generation_at_every_step_whenever_one_is_published(ranks: Ranks) -> None:
    first, second = (done.said for done in ranks(2, "together"))

    assert first["generations"] == second["generations"]
    assert len(set(first["generations"])) > 3  # publishes came in between, at moments of either rank
    assert first["apart"] == second["apart"] == [0] * STEPS


@pytest.mark.parametrize(("reload", "how", "first", "change"), [("manual", "group", 0, 5), ("auto", "auto", 1, 3)])
def test_a_program_of_several_ranks_may_choose_otherwise(
    ranks: Ranks, reload: str, how: str, first: int, change: int
) -> None:
    for done in ranks(2, how, GEMMTUNED_RELOAD=reload):
        generations = done.said["generations"]
        assert generations[:2] == [first] * 2
        assert generations[change:] == [2] * (STEPS - change)


def test_ranks_that_no_launcher_announced_hold_still_once_they_are_ranks(home: Home, ranks: Ranks) -> None:
    said = [done.said for done in ranks(2, "none", WORLD_SIZE="")]

    assert [one["generations"] for one in said] == [[1] * STEPS] * 2
    with sqlite3.connect(home.path / "tune.db") as conn:
        assert conn.execute("SELECT DISTINCT generation FROM sessions").fetchall() == [(1,)]


@pytest.mark.usefixtures("ranks")
def test_a_rank_without_the_hook_meets_the_others_in_the_reload(home: Home) -> None:
    done = home.run_ranks(2, WITHOUT, "2", "group")

    assert [one.said["generations"][-1] for one in done] == [2, 0]


# the last rank leaves the hook off: it still takes part in the collective
WITHOUT = f"""
import os, runpy
if os.environ["RANK"] == "1":
    import torch, gemmtuned
    gemmtuned.disable()
runpy.run_path({str(HERE / "ranks_program.py")!r}, run_name='__main__')
"""


BEGIN = """
    import json, os, time, torch, torch.distributed as dist
    import gemmtuned
    from hooked import publish, published, wait_for
    from ranks_program import ROUTER
    from gemmtuned.hooks import activate, ranks

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=2)
    """


def test_a_table_that_cannot_be_read_at_first_is_taken_up_by_all_once_it_can(home: Home, ranks: Ranks) -> None:
    done = home.run_ranks(
        2,
        BEGIN
        + """
    ranks.RETRY_S = 0.0
    wait_for(lambda: gemmtuned.generation() == 1)
    together = ranks.Together(dist.group.WORLD, hook=activate.current, every=1)
    folder, seen = activate.current().settings.config_dir, []
    if rank == 0:
        publish(folder, [published(ROUTER, "onednn")], 2)
        (table,) = (file for file in folder.glob("*.jsonl") if b"onednn" in file.read_bytes())
        whole = table.read_bytes()
        os.chmod(table, 0o644)
        table.write_bytes(whole[:-20])
    for step in range(4):
        if rank == 0 and step == 2:
            table.write_bytes(whole)
        together.step()
        seen.append(gemmtuned.generation())
    print(json.dumps(seen))
    """,
    )

    assert [one.said for one in done] == [[1, 1, 2, 2]] * 2


def test_ranks_agree_whether_all_take_part_and_one_that_does_not_breaks_nothing(home: Home) -> None:
    done = home.run_ranks(
        2,
        BEGIN
        + """
    ranks.AGREE_S = 1.0
    group = {name: dist.new_group([0, 1]) for name in ("both", "apart", "alone", "late")}
    said = {"both": ranks.all_agree(group["both"], "0.2.0")}
    said["apart"] = ranks.all_agree(group["apart"], f"0.{rank}.0")
    if rank == 0:
        said["alone"] = ranks.all_agree(group["alone"], "0.2.0")
        said["late"] = ranks.all_agree(group["late"], "0.2.0")
        dist.barrier()
    else:
        dist.barrier()
        said["late"] = ranks.all_agree(group["late"], "0.2.0")
    total = torch.ones(1)
    for each in group.values():  # each can still be used
        dist.all_reduce(total, group=each)
    print(json.dumps([said, total.item()]))
    """,
        AITER_TUNE_GEMM="0",
    )

    assert [one.said for one in done] == [
        [{"both": True, "apart": False, "alone": False, "late": False}, 16.0],
        [{"both": True, "apart": False, "late": False}, 16.0],
    ]


def test_a_first_rank_that_cannot_look_keeps_nobody_waiting(home: Home) -> None:
    done = home.run_ranks(
        2,
        BEGIN + "print(json.dumps(ranks.of_first(lambda: 1 // 0, dist.group.WORLD)))",
        AITER_TUNE_GEMM="0",
    )  # fmt: skip

    assert [one.said for one in done] == [0, 0]
    assert "ZeroDivisionError" in done[0].err


def test_status_says_when_the_ranks_of_a_run_hold_different_tables(home: Home) -> None:
    store = Store(home.path / "tune.db", locks=home.path / "locks")
    for rank, generation in enumerate((1, 2)):
        one = Session(host="h", pid=rank + 1, started_us=1, run="tp", path="native", generation=generation, rank=rank)
        store.sightings.beat(one, now_s=time.time())
    store.close()
    said = queries.sessions(home.path / "tune.db")
    report = status.report(
        Settings.from_env(home.environment()), notice=None, published=2, generation=2, sessions=said,
        covered_time=(0.0, 0.0), environments=[], saved_us=0.0, now_s=time.time(),
    )  # fmt: skip

    assert sorted(row["rank"] for row in said) == [0, 1]
    assert [note for note in report.notes if "tp" in note and "generations 1, 2" in note and "reload(group)" in note]
