"""A folder or bucket of objects, as a fleet uses it: put, create, get, list, delete, and the store's own clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from gemmtuned import __version__
from gemmtuned.configs.errors import TableError

MISSING: Final = "the extra is missing. Run: pip install obstore huggingface_hub"
AT_ONCE: Final = 8  # requests side by side


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing: its name, its size in bytes, when it came by the store's own clock."""

    path: str
    size: int
    modified_s: float


class Objects(Protocol):
    """What a fleet needs of a store. All methods raise TryLater when it cannot be reached.

    can_claim: whether `create` is decided by the store, so that of any number of hosts one wins.
    """

    can_claim: bool

    def put(self, path: str, data: bytes) -> None:
        """Write an object, in place of what was there."""

    def create(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one of this name; whether it was written."""

    def get(self, path: str, *, limit: int) -> bytes | None:
        """What an object holds; None when there is none. Raises TableError for one of more than `limit` bytes."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """The objects below a folder, those of names past `after` alone."""

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; what is gone already is no error."""

    def clock_s(self, path: str) -> float:
        """When this object was written, by the store's clock: right after a put, that clock's time."""

    def flush(self) -> None:
        """Bring to the store what was put so far, where it takes many objects in one step."""


def store_now_s(objects: Objects, path: str) -> float:
    """The time by the store's clock: when this object of our own is written now. Raises TryLater."""
    objects.put(path, __version__.encode())
    return objects.clock_s(path)


def put_many(objects: Objects, named: Sequence[tuple[str, bytes]]) -> None:
    """Write all of these, side by side. Raises TryLater; then some may be there and others not."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gemmtuned-put") as pool:
        for _ in pool.map(lambda one: objects.put(*one), named):
            pass


def get_many(objects: Objects, paths: Sequence[str], *, limit: int) -> Iterator[tuple[str, bytes | TableError | None]]:
    """(name, content) of each: None where there is none any more, the error where it is too large. Raises TryLater."""

    def get(path: str) -> tuple[str, bytes | TableError | None]:
        try:
            return path, objects.get(path, limit=limit)
        except TableError as err:
            return path, err

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gemmtuned-get") as pool:
        yield from pool.map(get, paths)
