"""Tables that AITER_CONFIG_* name: ours are used after a spot check, AITER's are seeds, and none is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, Home, published, wait_for

from gemmtuned.commands import spot_checking
from gemmtuned.commands.spot_checking import check_tables, check_waiting, spot_checks
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import columns_for, tuned_texts
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings, UserTables
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Candidate, Environment, Solution, cpu_device
from gemmtuned.configs.verdicts import Verdicts
from gemmtuned.hooks.background import Background
from gemmtuned.hooks.dispatch import Table, build_table
from gemmtuned.hooks.selections import Selections
from gemmtuned.hooks.user_tables import UserLoader, usable
from gemmtuned.hooks.watch import Watcher

BF16 = FAMILIES["bf16"]
COLUMNS = columns_for(BF16, kind="tuned")
ASM = ["gfx950", "256", "4", "8", "16", "False", "torch.float32", "torch.float32", "False", "False", "asm", "5"]


def write(path: Path, solutions: Iterable[Solution], *more: list[str]) -> Path:
    """A table as `gemmtuned export --format aiter-csv` writes it, and rows of AITER's own."""
    rows = [[*tuned_texts(s, BF16, cpu_device()).values()] for s in solutions]
    write_file(path, COLUMNS, [*rows, *more])
    return path


def loader(*paths: Path) -> UserLoader:
    return UserLoader([UserTables("AITER_CONFIG_GEMM_BF16", "bf16", paths)])


def checked(home: Home, table: Path) -> Path:
    """As `gemmtuned run` has it before the program starts."""
    check_tables(Settings.from_env({"GEMMTUNED_HOME": str(home.path), "AITER_CONFIG_GEMM_BF16": str(table)}))
    return table


def fine(solution: Solution) -> str:
    return ""


PROGRAM = """
    import json, sys, time, torch, gemmtuned
    torch.set_num_threads(2)
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        now = gemmtuned.status()
        if now["rows"] or any("not checked" not in reason for reason in now["refused"]):
            break
        time.sleep(0.01)
    for _ in range(3):
        y = torch.nn.functional.linear(x, w)
    right = torch.allclose(y.double(), x.double() @ w.double().t(), atol=1e-4)
    time.sleep(0.4)
    print(json.dumps({**gemmtuned.status(), "right": right}))
"""


@pytest.mark.long
def test_a_program_uses_a_table_of_ours_that_aiters_variable_names_and_says_so_in_aiters_words(home: Home) -> None:
    table = checked(home, write(home.path.parent / "mine.csv", [published(LINEAR, "torch_swap")], ASM))
    before = table.read_bytes(), table.stat().st_mtime_ns

    done = home.run(PROGRAM, AITER_CONFIG_GEMM_BF16=f"{table}:/nowhere/b.csv", AITER_LOG_TUNED_CONFIG="1")

    assert done.said["rows"] == 1, done.err
    assert done.said["refused"] == {"asm: a library of the table's, a seed for the search": 1}
    assert done.said["right"]
    assert home.counts()[str(LINEAR), "exact"] == 3
    hits = [line for line in done.err.splitlines() if "is tuned on cu_num" in line]
    assert hits == [
        "[gemmtuned] shape is M:4, N:8, K:16 dtype='torch.float32' otype='torch.float32' bias=False, scaleAB=False, "
        f"bpreshuffle=False found padded_M: 4, N:8, K:16 is tuned on cu_num = {cpu_device().units} in {table}, "
        "libtype is torch_swap, kernel name is "
    ]
    misses = [line for line in done.err.splitlines() if "not found tuned config" in line]
    assert [line.split(" dtype")[0] for line in misses] == ["[gemmtuned] shape is M:4, N:8, K:16"]  # in fp64
    assert "/nowhere/b.csv" in done.err
    assert (table.read_bytes(), table.stat().st_mtime_ns) == before


@pytest.mark.long
def test_a_program_that_only_dispatches_logs_too_and_writes_no_database(home: Home) -> None:
    table = checked(home, write(home.path.parent / "mine.csv", [published(LINEAR, "torch_swap")]))

    done = home.run(
        PROGRAM,
        AITER_TUNE_GEMM="0",
        GEMMTUNED_DISPATCH="1",
        AITER_CONFIG_GEMM_BF16=str(table),
        AITER_LOG_TUNED_CONFIG="1",
    )

    assert done.said["rows"] == 1, done.err
    assert done.err.count("is tuned on cu_num") == 1
    assert not (home.path / "tune.db").exists()


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"device": "cpu-other"}, "another device"),
        ({"stamp": "1.0"}, "another version"),
    ],
)
def test_a_row_of_ours_that_does_not_hold_here_is_refused_with_the_reason(
    home: Home, columns: dict[str, Any], why: str
) -> None:
    table = write(home.path.parent / "mine.csv", [published(LINEAR, "torch_swap", **columns)])

    done = home.run(PROGRAM, AITER_CONFIG_GEMM_BF16=str(table))

    assert done.said["rows"] == 0
    assert [why in reason for reason in done.said["refused"]] == [True], done.said["refused"]
    assert done.said["right"]


def test_a_selection_is_told_once_and_again_when_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = Environment(cpu_device(), {"torch_swap": "1"})
    there = replace(published(LINEAR, "torch_swap"), stamp="1")
    empty, full = (build_table(rows, {"cpu": environment}, generation=1, failed=frozenset()) for rows in ([], [there]))
    told = Selections(tmp_path, lambda solution: None)

    for outcome, table in (("miss", empty), ("miss", empty), ("exact", full), ("exact", full), ("exact", empty)):
        told.note(Sighting(LINEAR, outcome, 1), table, cpu_device())
    told.finish()

    lines = capsys.readouterr().err.splitlines()
    assert ["not found tuned config" in line for line in lines] == [True, False]
    assert "is tuned on cu_num" in lines[1]


def test_a_miss_of_before_the_tables_were_there_is_told_when_they_lack_it_or_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = Environment(cpu_device(), {"torch_swap": "1"})
    rows = [replace(published(LINEAR.with_m(m), "torch_swap"), stamp="1") for m in (1, 2, 3)]
    none, full = (build_table(r, {"cpu": environment}, generation=1, failed=frozenset()) for r in ([], rows))
    told = Selections(tmp_path, lambda solution: None, waits=True)

    def note(m: int, outcome: str, table: Table) -> list[tuple[str, bool]]:
        told.note(Sighting(LINEAR.with_m(m), outcome, 1), table, cpu_device())
        return said()

    def said() -> list[tuple[str, bool]]:
        lines = capsys.readouterr().err.splitlines()
        return [(line.partition(",")[0][-1], "not found" not in line) for line in lines]

    assert [note(m, "miss", none) for m in (1, 2, 9)] == [[], [], []]
    told.loaded()
    assert note(3, "miss", full) == [("9", False)]  # 3 was counted before the table came, and drained after
    assert note(8, "miss", full) == [("8", False)]
    assert note(1, "exact", full) == [("1", True)]
    told.finish()
    assert sorted(said()) == [("2", False), ("3", False)]


def test_the_file_named_is_the_one_that_brought_the_solution_into_use(tmp_path: Path) -> None:
    exported = published(LINEAR, "torch_swap")
    path = write(tmp_path / "t.csv", [exported])
    user = loader(path)
    user.load()

    usable(user, [], check=fine)
    assert user.solutions_file(exported) == path
    usable(user, [exported], check=fine)  # published here meanwhile, and the same
    assert user.solutions_file(exported) is None


@pytest.mark.long
def test_a_row_that_nobody_has_tried_is_asked_for_and_used_once_it_is_answered(home: Home) -> None:
    table = write(home.path.parent / "mine.csv", [published(LINEAR, "torch_swap")])
    program = home.start(
        """
        import json, os, gemmtuned, torch
        from hooked import wait_for
        from gemmtuned.hooks import watch
        watch.BLIND_POLL_S = watch.POLL_S = 0.1
        wait_for(lambda: gemmtuned.status()["refused"])
        print(json.dumps(gemmtuned.status()["refused"]), flush=True)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no children", flush=True)
        wait_for(lambda: gemmtuned.status()["rows"] == 1, limit_s=30)
        """,
        AITER_CONFIG_GEMM_BF16=str(table),
    )
    assert program.stdout is not None
    refused, children = program.stdout.readline(), program.stdout.readline()
    assert "not checked yet" in refused and children == "no children\n"
    assert check_waiting(Settings.from_env({"GEMMTUNED_HOME": str(home.path)})) == 1
    _, err = program.communicate(timeout=60)

    assert program.returncode == 0, err


def test_one_of_several_ranks_uses_published_tables_alone(home: Home) -> None:
    """Each rank would take the user's table up when its own check is done: ranks must not differ for so long."""
    table = write(home.path.parent / "mine.csv", [published(LINEAR, "torch_swap")])

    done = home.run(PROGRAM, AITER_CONFIG_GEMM_BF16=str(table), WORLD_SIZE="2", RANK="0")

    assert done.said["rows"] == 0
    assert ["ranks of one program" in reason for reason in done.said["refused"]] == [True]


@pytest.mark.long
def test_what_cannot_run_or_is_too_large_does_not_pass_the_spot_check() -> None:
    mv, large = published(LINEAR, "torch_mv"), published(LINEAR.with_m(1 << 24), "torch_swap")

    first, second = spot_checks([mv, large])  # in a process of its own, as a running program has it done

    assert "torch_mv does not run" in first
    assert second == "too large for a spot check"


def test_a_spot_check_that_dies_refuses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    assert ["did not run" in reason for reason in spot_checks([published(LINEAR, "torch_swap")] * 2)] == [True, True]


def test_a_check_that_was_short_of_memory_is_no_answer_and_is_made_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from gemmtuned.kernels.backends import BACKENDS
    from gemmtuned.kernels.spot_check import spot_check

    settings, row = Settings.from_env({"GEMMTUNED_HOME": str(home.path)}), published(LINEAR, "torch_swap")

    class Greedy:
        def prepare(self, candidate: Candidate, problem: Problem) -> Any:
            return torch.empty(1 << 55, dtype=torch.uint8)

    monkeypatch.setitem(BACKENDS, "torch_swap", Greedy())  # type: ignore[arg-type]
    short = spot_check(row, device=torch.device("cpu"))
    monkeypatch.undo()
    verdicts = Verdicts(settings.home)
    verdicts.ask([row])
    monkeypatch.setattr(spot_checking, "spot_checks", lambda rows: [short])
    assert "can't allocate memory" in short and check_waiting(settings) == 0
    assert verdicts.of(row) is None and list(verdicts.open()) == [row]

    monkeypatch.setattr(spot_checking, "spot_checks", lambda rows: [""])
    assert check_waiting(settings) == 1 and verdicts.of(row) == ""


WRONG = ("dropped_tail", "double_counted", "nan_result", "low_precision", "wrong_dtype", "wrong_shape", "raises")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_does_not_pass_the_spot_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import planted_kernels
    import torch

    from gemmtuned.kernels.backends import BACKENDS
    from gemmtuned.kernels.backends.base import StatelessKernel
    from gemmtuned.kernels.spot_check import spot_check

    class Planted:
        kernel = StatelessKernel(getattr(planted_kernels, name))

        def prepare(self, candidate: object, problem: object) -> StatelessKernel:
            return self.kernel

    good = published(replace(LINEAR, k=256), "torch_swap")
    assert spot_check(good, device=torch.device("cpu")) == ""

    monkeypatch.setitem(BACKENDS, "torch_swap", Planted())  # type: ignore[arg-type]
    assert spot_check(good, device=torch.device("cpu")) != ""


def test_what_this_machine_published_goes_before_the_users_table(tmp_path: Path) -> None:
    own = published(LINEAR, "torch_swap", us=9.0)
    user = loader(
        write(tmp_path / "t.csv", [replace(own, backend="onednn", us=5.0), published(LINEAR.with_m(5), "onednn")])
    )

    assert user.load()
    taken, refused = usable(user, [own], check=fine)

    assert [s.problem.m for s in taken] == [5]
    assert list(refused.values()) == [1]


def test_a_row_edited_by_hand_loses_its_solution(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [published(LINEAR, "torch_swap")])
    path.write_text(path.read_text().replace(",8,16,", ",9,16,", 1))
    user = loader(path)
    user.load()

    assert not user.solutions
    assert dict(user.seeds) == {"torch_swap": 1}


def test_a_bad_table_is_told_once_and_the_others_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("garbage\n")
    user = loader(bad, write(tmp_path / "good.csv", [published(LINEAR, "torch_swap")]))

    assert user.load()
    bad.write_text("garbage \n")
    assert user.load()

    assert len(user.solutions) == 1
    assert len([r for r in caplog.records if "bad.csv" in r.getMessage()]) == 1


@pytest.mark.parametrize("end", ["garbage", "another family's"])
def test_a_table_that_turned_bad_keeps_its_last_good_rows(
    end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "t.csv", [published(LINEAR, "torch_swap")], ASM)
    user = loader(path)
    user.load()
    path.write_text("garbage\n" if end == "garbage" else "cu_num,M,N,K,kernelId,us\n")

    assert user.load()
    assert (list(user.solutions), dict(user.seeds)) == ([published(LINEAR, "torch_swap")], {"asm": 1})
    assert "its earlier rows stay in use" in caplog.text
    write(path, [])
    assert user.load()
    assert (list(user.solutions), dict(user.seeds)) == ([], {})


def test_only_a_change_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [published(LINEAR, "torch_swap")])
    user = loader(path)

    assert [user.load(), user.load()] == [True, False]
    path.unlink()
    assert user.load()
    assert not user.solutions


@pytest.mark.parametrize("how", ["rename", "in place"])
def test_a_changed_table_is_taken_up_within_a_second(tmp_path: Path, how: str) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "mine").mkdir()
    path = write(tmp_path / "mine/t.csv", [published(LINEAR, "torch_swap")])
    user, seen = loader(path), threading.Event()

    def reload() -> int | None:
        if not user.load():
            return None
        if len(user.solutions) == 2:
            seen.set()
        return 0

    watcher = Watcher(tmp_path / "published", reload, automatic=True, files=user.files)
    background = Background([watcher], watcher.events)
    background.start()
    wait_for(lambda: len(user.solutions) == 1)
    time.sleep(0.5)  # the observer is there
    both = [published(LINEAR, "torch_swap"), published(LINEAR.with_m(5), "torch_swap")]
    if how == "rename":
        write(path, both)
    else:
        path.write_bytes(write(tmp_path / "other.csv", both).read_bytes())

    try:
        assert seen.wait(3.0)  # 0.1 s on a quiet machine; the poll alone takes 4 s and more
    finally:
        background.end(10)


def test_the_variables_are_read_as_paths_parted_by_colons(tmp_path: Path) -> None:
    env = {
        "GEMMTUNED_HOME": str(tmp_path), "AITER_CONFIG_GEMM_BF16": "/a.csv: /b.csv::/a.csv", "AITER_CONFIG_FMOE": "",
        "AITER_CONFIG_GEMM_A4W4": "c.csv",
    }  # fmt: skip

    found = Settings.from_env(env).tables

    assert [(t.variable, t.family, [str(p) for p in t.paths]) for t in found] == [
        ("AITER_CONFIG_GEMM_BF16", "bf16", ["/a.csv", "/b.csv"]),
        ("AITER_CONFIG_GEMM_A4W4", "a4w4_blockscale", [str(Path.cwd() / "c.csv")]),
    ]


def test_rows_that_nobody_has_tried_are_looked_for_again_only_where_an_answer_came(home: Home) -> None:
    """With 3,000 such rows each look took half a second of CPU, every five seconds for ever."""
    own = [replace(LINEAR, n=n) for n in range(1, 31)]
    table = write(home.path.parent / "mine.csv", [published(one, "torch_swap") for one in own])
    done = home.run(
        """
        import json, os, gemmtuned
        from gemmtuned.configs import verdicts
        from gemmtuned.hooks.activate import current
        tables = current().tables
        gemmtuned.reload()
        assert len(tables._unchecked) == 30
        folder = os.path.join(os.environ["GEMMTUNED_HOME"], "checked")
        reads, read = [], verdicts._read
        verdicts._read = lambda path: reads.append(path) or read(path)
        found = []
        for step in range(4):
            if step == 2:
                tables.verdicts.answer(tables._unchecked[7], "")
            else:
                os.utime(folder, (1e9, 1e9))  # quiet for long
            reads.clear()
            gemmtuned.reload()
            found.append([len(reads) > 0, gemmtuned.status()["rows"]])
        print(json.dumps(found[1:]))
        """,
        AITER_CONFIG_GEMM_BF16=str(table),
        GEMMTUNED_RELOAD="manual",
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [[False, 0], [True, 1], [True, 1]], "the first look after a change is one"
