"""What can be wrong with a built library and with the file of facts beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def zeroed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(4096))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": cut,
    "a page of zeros": zeroed,
    "empty": lambda path: path.write_bytes(b""),
    "of another build": lambda path: path.with_suffix(".json").write_text('{"bytes": 1, "sha256": "0"}'),
    "without its facts": lambda path: path.with_suffix(".json").unlink(),
    "with facts that are no JSON": lambda path: path.with_suffix(".json").write_text("{"),
}
