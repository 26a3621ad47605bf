"""A data set repository of the Hugging Face hub as the store of a fleet: hf://datasets/owner/name[/folder].

Made for public tables.  What is put is held back and brought there as one commit, since each commit is a step of a
git history; nothing can be claimed there.  The token is the one that `hf auth login` left.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemmtuned.configs.errors import SettingError, TableError, TryLater
from gemmtuned.fleet.objects import MISSING, Entry


class HubObjects:
    """See the module. api: huggingface_hub.HfApi, or what stands in for it in a test.

    propose: what is put comes as a pull request, which its owners take over or not.
    """

    can_claim = False

    def __init__(self, url: str, api: Any = None, *, propose: bool = False) -> None:
        parts = [part for part in f"{urlsplit(url).netloc}{urlsplit(url).path}".split("/") if part]
        if len(parts) < 3 or parts[0] != "datasets":
            raise SettingError(f"{url!r}: expected hf://datasets/owner/name")
        try:
            self._hub: Any = importlib.import_module("huggingface_hub")
        except ImportError as err:
            raise SettingError(f"{url}: {MISSING}") from err
        self._url, self._repo, self._folder = url, "/".join(parts[1:3]), "".join(f"{part}/" for part in parts[3:])
        self._api = self._hub.HfApi() if api is None else api
        self._propose = propose
        self._waiting: dict[str, bytes] = {}
        self._sizes: dict[str, int] | None = None

    def put(self, path: str, data: bytes) -> None:
        self._waiting[path] = data

    def create(self, path: str, data: bytes) -> bool:
        raise SettingError(f"{self._url}: nothing can be claimed in a repository")

    def get(self, path: str, *, limit: int) -> bytes | None:
        if path in self._waiting:
            return self._waiting[path]
        size = self._listed().get(path)
        if size is None:
            return None
        if size > limit:
            raise TableError(f"{path}: {size} bytes, at most {limit} are read")
        where = self._ask(self._api.hf_hub_download, self._repo, f"{self._folder}{path}", repo_type="dataset")
        return Path(where).read_bytes()[: limit + 1]

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        for path, size in sorted(self._listed().items()):
            if path.startswith(f"{prefix}/") and path > after:
                yield Entry(path, size, 0.0)

    def delete(self, paths: Iterable[str]) -> None:
        gone = [self._hub.CommitOperationDelete(f"{self._folder}{path}") for path in paths if path in self._listed()]
        if gone:
            self._commit(gone, "Old results go")

    def clock_s(self, path: str) -> float:
        return time.time()

    def make(self) -> None:
        """Make the repository, for its owner alone until they publish it, where there is none."""
        self._ask(self._api.create_repo, self._repo, repo_type="dataset", private=True, exist_ok=True)

    def flush(self) -> None:
        add = self._hub.CommitOperationAdd
        if not self._waiting:
            return
        found = self._waiting.items()
        added = [add(path_in_repo=f"{self._folder}{path}", path_or_fileobj=data) for path, data in found]
        self._commit(added, f"{len(added)} files from gemmtuned sync")
        self._waiting = {}  # what failed is brought by the next one

    def _commit(self, operations: Sequence[Any], message: str) -> None:
        self._ask(
            self._api.create_commit, self._repo, operations, commit_message=message, repo_type="dataset",
            create_pr=self._propose,
        )  # fmt: skip
        self._sizes = None

    def _listed(self) -> dict[str, int]:
        if self._sizes is None:
            tree = self._ask(lambda: list(self._api.list_repo_tree(self._repo, repo_type="dataset", recursive=True)))
            sizes = {str(one.path): int(one.size) for one in tree if hasattr(one, "size")}
            skip = len(self._folder)
            self._sizes = {path[skip:]: size for path, size in sizes.items() if path.startswith(self._folder)}
        return self._sizes

    def _ask(self, call: Any, *args: Any, **named: Any) -> Any:
        try:
            return call(*args, **named)
        except Exception as err:  # the hub's, requests' and httpx's own kinds
            first = (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
            raise TryLater(f"{self._url}: cannot be reached ({first})") from err
