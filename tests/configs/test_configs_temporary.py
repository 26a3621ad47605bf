"""A file that several writers replace at a time is whole, also where they have the number of one process."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from other_users import as_user
from store_cases import new_store

from gemmtuned.configs import aiter_write, triton_json
from gemmtuned.configs.manifest import write_whole
from gemmtuned.configs.temporary import put
from gemmtuned.daemon.status_file import replace_file
from gemmtuned.db.upkeep import backup
from gemmtuned.reports.shared_file import Watched

WAYS: dict[str, Callable[[Path, str], object]] = {
    "a table": lambda path, text: write_whole(path, text.encode()),
    "a table of AITER's": lambda path, text: aiter_write.write_file(path, ["a"], [[c] for c in text]),
    "a tile file": lambda path, text: triton_json.write_file(path, {"any": {"BLOCK_SIZE_M": len(text)}}),
    "what the daemon says": lambda path, text: replace_file(path, text) or pytest.fail("it was not written"),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_writers_of_one_number_leave_one_of_both_texts_and_nothing_beside_it(tmp_path: Path, way: str) -> None:
    path, errors, texts = tmp_path / "file", [], ("one" * 300, "two" * 500)
    alone = set()
    for text in texts:
        WAYS[way](path, text)
        alone.add(path.read_bytes())

    def write(text: str) -> None:
        try:
            for _ in range(40):
                WAYS[way](path, text)
                assert path.read_bytes() in alone
        except BaseException as err:
            errors.append(err)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert not errors
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def _shared(path: Path) -> None:
    file = Watched()
    file.open(path)
    file.replace(path, lambda new: aiter_write.write_file(new, ["a"], [["secret"]]))


def _backed_up(path: Path) -> None:
    store = new_store(path.parent / "home")
    store.close()
    store.path.chmod(stat.S_IMODE(path.stat().st_mode))
    backup(store.path, path, timeout_s=1.0)


REPLACED: dict[str, Callable[[Path], object]] = {
    "text": lambda path: put(path, b"secret"),
    "a table of AITER's": lambda path: aiter_write.write_file(path, ["a"], [["secret"]]),
    "a shared table": _shared,
    "a backup of the database": _backed_up,
}


@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_what_is_closed_to_others_is_never_open_to_them_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, mode: int
) -> None:
    path, seen = tmp_path / "file", set()
    path.write_text("a\n1\n")
    path.chmod(mode)

    def looking(call: Callable[..., None]) -> Callable[..., None]:
        def look(*given: Any, **named: Any) -> None:
            seen.update(stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir() if p.name.startswith(".file"))
            call(*given, **named)

        return look

    for name in ("fsync", "chmod"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    REPLACED[way](path)

    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert seen
    assert seen <= {0o600, mode}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(("group", "mode", "kept"), [(4002, 0o660, (4002, 0o660)), (4003, 0o664, (4001, 0o644))])
def test_another_owners_file_keeps_the_group_that_we_are_in_and_opens_to_no_other(
    tmp_path: Path, group: int, mode: int, kept: tuple[int, int]
) -> None:
    """We may write into its folder, and may not give a file to another owner."""
    folder = tmp_path / "shared"
    folder.mkdir()
    path = folder / "file"
    path.write_text("before")
    os.chown(path, 4000, group)
    path.chmod(mode)
    folder.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)

    assert as_user(4001, 4001, lambda: put(path, b"after"), groups=[4002]) == "None"
    assert path.read_text() == "after"
    facts = path.stat()
    assert (facts.st_gid, stat.S_IMODE(facts.st_mode)) == kept
