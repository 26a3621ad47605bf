"""file://, s3://, gs:// and az:// through obstore, which finds credentials as each cloud's own tools do.

It is an extra (`pip install obstore`) and is imported when a store is opened.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

from gemmtuned.configs.errors import SettingError, TableError, TryLater
from gemmtuned.fleet.objects import MISSING, Entry

_CLIENT: Final = {"timeout": "20s", "connect_timeout": "5s", "allow_http": True}  # http only where an endpoint says so
_RETRY: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


class BucketObjects:
    """See the module."""

    can_claim = True

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._lib: Any = importlib.import_module("obstore")
            stores: Any = importlib.import_module("obstore.store")
        except ImportError as err:
            raise SettingError(f"{url}: {MISSING}") from err
        self._already: Any = importlib.import_module("obstore.exceptions").AlreadyExistsError
        self._errors: tuple[type[Exception], ...] = (importlib.import_module("obstore.exceptions").BaseError, OSError)
        try:
            if url.startswith("file:"):
                path = _folder(url)
                if not path.is_absolute() or urlsplit(url).netloc:
                    meant = f"/{urlsplit(url).netloc}{path}".replace("//", "/").rstrip("/")
                    near = f". Did you mean file://{meant}?" if meant else ""
                    raise SettingError(f"{url!r} has no absolute path, expected file:///folder{near}")
                self._store = stores.LocalStore(prefix=path, mkdir=True)
            else:
                self._store = stores.from_url(url, client_options=_CLIENT, retry_config=_RETRY)
        except SettingError:
            raise
        except Exception as err:  # each cloud's own kind
            raise SettingError(f"{url}: cannot be opened ({_first(err)})") from err

    def put(self, path: str, data: bytes) -> None:
        with self._reached(path):
            self._lib.put(self._store, path, data)

    def create(self, path: str, data: bytes) -> bool:
        with self._reached(path):
            try:
                self._lib.put(self._store, path, data, mode="create")
            except self._already:
                return False
            return True

    def get(self, path: str, *, limit: int) -> bytes | None:
        with self._reached(path):
            try:
                found = self._lib.get(self._store, path)
                if int(found.meta["size"]) > limit:
                    raise TableError(f"{path}: {found.meta['size']} bytes, at most {limit} are read")
                return bytes(found.bytes())
            except FileNotFoundError:
                return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        with self._reached(prefix):
            for batch in self._lib.list(self._store, prefix, offset=after or None, chunk_size=1000):
                for one in batch:
                    yield Entry(str(one["path"]), int(one["size"]), one["last_modified"].timestamp())

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._reached(path):
                try:
                    self._lib.delete(self._store, path)
                except FileNotFoundError:
                    pass

    def clock_s(self, path: str) -> float:
        with self._reached(path):
            return float(self._lib.head(self._store, path)["last_modified"].timestamp())

    def flush(self) -> None:
        """Nothing is held back."""

    @contextmanager
    def _reached(self, path: str) -> Iterator[None]:
        try:
            yield
        except self._errors as err:
            raise TryLater(f"{self._url}/{path}: cannot be reached ({_first(err)})") from err


def _folder(url: str) -> Path:
    """The folder of a file:// URL, where %20 stands for a space; as it is written if there is one of such a name."""
    written = urlsplit(url).path
    return Path(written) if Path(written).is_dir() else Path(os.fsdecode(unquote_to_bytes(os.fsencode(written))))


def _first(err: Exception) -> str:
    """The first line of an error: the libraries add a whole description of themselves."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:400]
