"""Tables that are not taken up: cut, spoilt, of another owner, or not by the rules."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, publish, solution

from gemmtuned.configs.manifest import MANIFEST
from gemmtuned.hooks import watch
from gemmtuned.hooks.watch import Loader

ROWS = [solution(LINEAR.with_m(m), "torch_swap", "cpu-test", "2.13") for m in (1, 2, 3)]


def write_by_hand(folder: Path, text: str, *, generation: int = 2, rows: int | None = None, digest: str = "") -> None:
    """A published table whose content is anything at all."""
    data = text.encode()
    name = "table-by-hand.jsonl"
    (folder / name).write_bytes(data)
    facts = {
        "name": name,
        "sha256": digest or sha256(data).hexdigest(),
        "rows": text.count("\n") if rows is None else rows,
    }
    text = json.dumps({"schema": 1, "generation": generation, "created": "now", "files": [facts]})
    (folder / MANIFEST).write_text(text)


def row(**columns: Any) -> str:
    return json.dumps({**ROWS[0].to_row(), **columns}) + "\n"


# ---- what is not taken


def cut_table(folder: Path) -> None:
    publish(folder, ROWS, 2)
    (table,) = [
        p
        for p in folder.glob("*.jsonl")
        if p.stat().st_mtime_ns == max(q.stat().st_mtime_ns for q in folder.glob("*.jsonl"))
    ]
    table.write_bytes(table.read_bytes()[:-20])


def other_owner(folder: Path) -> None:
    publish(folder, ROWS, 2)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    for table in folder.glob("*.jsonl"):
        os.chown(table, 12345, 12345)


def writable(what: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        publish(folder, [*ROWS, *ROWS], 2)
        for path in folder.glob(what) if what else [folder]:
            path.chmod(path.stat().st_mode | 0o020)

    return spoil


def manifest_of(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST).write_text(text) and None


def link(folder: Path) -> None:
    publish(folder, [*ROWS, *ROWS], 2)
    real = folder / MANIFEST
    real.rename(folder.parent / "elsewhere.json")
    real.symlink_to(folder.parent / "elsewhere.json")


HEAD = '{"schema": 1, "generation": 2, "created": "", "files": '
SPOILT = {
    "cut table": cut_table,
    "wrong hash": lambda f: write_by_hand(f, row(), digest="0" * 64),
    "wrong number of rows": lambda f: write_by_hand(f, row(), rows=2),
    "table of another owner": other_owner,
    "table others may write": writable("*.jsonl"),
    "manifest others may write": writable(MANIFEST),
    "folder others may write": writable(""),
    "manifest is a link": link,
    "garbage": manifest_of("\x00\xff{{{"),
    "a list": manifest_of("[]"),
    "nothing": manifest_of(""),
    "deep": manifest_of("[" * 100_000),
    "another schema": manifest_of('{"schema": 99, "generation": 2, "created": "", "files": []}'),
    "odd files": manifest_of(HEAD + '[{"name": ["a"], "sha256": [], "rows": {}}]}'),
    "path as a name": manifest_of(HEAD + '[{"name": "../../etc/passwd", "sha256": "", "rows": 1}]}'),
    "older": lambda f: write_by_hand(f, row(), generation=0),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_what_cannot_be_trusted_is_refused_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    folder = tmp_path / "configs"
    publish(folder, ROWS[:1], 1)
    loader = Loader(folder)
    assert loader.load(newer_than=0) == (1, ROWS[:1])

    SPOILT[what](folder)

    assert [loader.load(newer_than=1) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert str(folder) in caplog.text
    assert loader.failures == 3 and str(folder) in loader.refused


def test_what_was_refused_is_forgotten_with_the_next_good_table(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    loader = Loader(folder)
    cut_table(folder)
    assert loader.load(newer_than=0) is None and loader.refused
    publish(folder, ROWS, 3)
    assert loader.load(newer_than=0) == (3, ROWS) and not loader.refused


def test_another_table_of_the_same_number_is_taken_up_once(tmp_path: Path) -> None:
    """A backup of the home was put back, and its daemon has come to the number that the program holds."""
    folder = tmp_path / "configs"
    loader = Loader(folder)
    publish(folder, ROWS, 5)
    assert loader.load(newer_than=0) == (5, ROWS)
    publish(folder, ROWS[:1], 4)
    assert loader.load(newer_than=5) is None and "generation 4 is older than 5" in loader.refused
    publish(folder, ROWS[:2], 5)

    assert loader.load(newer_than=5) == (5, ROWS[:2]) and not loader.refused
    assert loader.load(newer_than=5) is None
    publish(folder, ROWS[:2], 5)  # written anew with the same rows
    assert loader.load(newer_than=5) is None


def test_a_callback_that_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="on_reload takes a function of one argument"):
        watch.subscribe(None)  # type: ignore[arg-type]


def test_a_table_cut_anywhere_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "configs", ROWS, 1)
    (table,) = (tmp_path / "configs").glob("*.jsonl")
    data = table.read_bytes()

    for size in range(0, len(data), 7):
        table.write_bytes(data[:size])
        assert Loader(table.parent).load(newer_than=0) is None


BAD_ROWS = {
    "unknown dtype": {"dtype": "__import__('os').system('true')"},
    "path for a backend": {"backend": "../../lib/evil.so"},
    "formula for a config": {"config": ["=cmd()"]},
    "negative size": {"m": -1},
    "size beyond all": {"k": 2**40},
    "no time": {"us": 0},
    "not a number": {"us": "fast"},
    "unknown state": {"state": "good"},
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_bad_row_costs_that_row(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    folder = tmp_path / "configs"
    folder.mkdir(mode=0o755)
    write_by_hand(folder, row() + row(**BAD_ROWS[what]) + "not json\n", generation=1)

    assert Loader(folder).load(newer_than=0) == (1, ROWS[:1])
    assert len(caplog.records) == 1
    assert "2 rows are not used" in caplog.text
