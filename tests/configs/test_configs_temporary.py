"""A file that several writers replace at a time is whole, also where they have the number of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmtuned.configs import aiter_write, triton_json
from gemmtuned.configs.manifest import write_whole
from gemmtuned.daemon.status_file import replace_file

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
