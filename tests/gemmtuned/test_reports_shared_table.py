"""Several writers of one tuned table: two tuners of ours and an editor. All rows are there in the end."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Solution
from gemmtuned.reports.tuned_files import TunedTable

HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,note"
ROW = "gfx942,304,{m},512,512,False,torch.bfloat16,torch.bfloat16,False,False,asm,7,2,9.5,k,editor\n"
DEVICE = Device("cuda-x-132", "cuda", "X", "sm_90", 132)


def solution(m: int, n: int) -> Solution:
    return Solution(
        problem=Problem(m=m, n=n, k=256), device=DEVICE.key, mode="graph", covers="exact", backend="triton",
        config="{\"kernel\":\"tiles\"}", stamp="1",
        us=4.0, baseline_us=8.0, gain_low=1.5, err=0.0, baseline_err=0.0, generation=1, state="published",
    )  # fmt: skip


def tuner(path: Path, n: int, until: float, done: multiprocessing.Queue[tuple[str, int]]) -> None:
    table, m = TunedTable(path, FAMILIES["bf16"]), 0
    while time.monotonic() < until:
        m += 1
        table.add(solution(m, n), DEVICE)
        table.write()
        time.sleep(random.uniform(0, 0.02))
    time.sleep(0.1)  # the editor's last line
    table.finish()
    table.write()
    done.put((f"tuner {n}", m))


def editor(path: Path, until: float, done: multiprocessing.Queue[tuple[str, int]]) -> None:
    """Adds a line at a time into the file that is there, as `echo >>` does, slowly now and then."""
    m = 0
    while time.monotonic() < until:
        m += 1
        with path.open("a") as file:
            time.sleep(random.choice((0, 0, 0.005)))
            file.write(ROW.format(m=m))
        time.sleep(random.uniform(0, 0.03))
    done.put(("editor", m))


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60, marks=pytest.mark.soak)])
def test_two_tuners_and_an_editor_lose_nothing(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n")
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    until = time.monotonic() + seconds
    jobs = [(tuner, (path, 128, until, done)), (tuner, (path, 256, until, done)), (editor, (path, until, done))]
    running = [context.Process(target=job, args=args) for job, args in jobs]
    for process in running:
        process.start()
    counts = dict(done.get(timeout=seconds + 20) for _ in running)
    for process in running:
        process.join(30)

    table = read_file(path)

    assert table.rejected == 0
    found = {(row["note"] or f"tuner {row['N']}", int(row["M"])) for row in table.rows}
    assert found == {(who, m) for who, count in counts.items() for m in range(1, count + 1)}
    assert len(table.rows) == len(found)
    left = {entry for entry in os.listdir(tmp_path) if entry not in ("t.csv", ".t.csv.lock")}
    assert left == set()


def test_what_an_editor_puts_in_the_files_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n{ROW.format(m=1)}")
    table = TunedTable(path, FAMILIES["bf16"])
    table.add(solution(8, 128), DEVICE)
    table.write()

    other = tmp_path / "other.csv"
    other.write_text(f"{HEADER}\n{ROW.format(m=1)}{ROW.format(m=2)}")
    other.rename(path)
    table.add(solution(9, 128), DEVICE)
    table.write()

    assert [(row["M"], row["N"]) for row in read_file(path).rows] == [
        ("1", "512"), ("2", "512"), ("8", "128"), ("9", "128"),
    ]  # fmt: skip


def test_remarks_of_others_stay(tmp_path: Path) -> None:
    """A row that somebody has put out of use by a mark is among them."""
    path = tmp_path / "tuned.csv"
    first = TunedTable(path, FAMILIES["bf16"])
    first.add(solution(1, 64), DEVICE)
    first.write()
    header, row = path.read_text().splitlines()
    path.write_text(f"# tuned at night\n// twice\n{header}\n#{row}\n{row}\n  # the end")

    for n in (128, 192):
        table = TunedTable(path, FAMILIES["bf16"])
        table.add(solution(1, n), DEVICE)
        table.write()
    lines = path.read_text().splitlines()
    assert lines[:4] == ["# tuned at night", "// twice", header, row]
    assert lines[-2:] == [f"#{row}", "  # the end"] and len(lines) == 8
    assert len(read_file(path).rows) == 3
