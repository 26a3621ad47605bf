"""The store of objects that a URL names."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.nearest_word import nearest
from gemmtuned.fleet.buckets import BucketObjects
from gemmtuned.fleet.hugging_face import HubObjects
from gemmtuned.fleet.objects import Objects

SCHEMES: Final = ("file", "s3", "gs", "az", "hf")


def open_objects(url: str, *, propose: bool = False) -> Objects:
    """The store of this URL. Raises SettingError for a URL that is none, or without the extra that it needs.

    propose: for hf:// alone, where what is put is a pull request.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or (parts.scheme != "file" and not parts.netloc) or parts.query or parts.fragment:
        raise SettingError(
            f"{url!r} is not a URL to share results at, expected file:///folder, s3://bucket/folder, gs://, az:// or "
            f"hf://datasets/owner/name{_meant(url)}"
        )
    if parts.scheme == "hf":
        return HubObjects(url, propose=propose)
    if propose:
        raise SettingError(f"{url}: only a repository at hf:// takes proposals")
    return BucketObjects(url)


def as_text(url: str) -> str:
    """The URL with each byte that is no text as %FF: the database keeps text alone."""
    return "".join(f"%{ord(one) - 0xDC00:02X}" if "\udc80" <= one <= "\udcff" else one for one in url)


def _meant(url: str) -> str:
    """What to write instead: a folder's path as a URL, a scheme that is written nearly like one of ours."""
    scheme, parted, rest = url.partition("://")
    if parted:
        near = nearest(scheme, SCHEMES)
        return f". Did you mean {near}://{rest}?" if near and near != scheme and rest else ""
    if not url.strip() or ":" in url:
        return ""
    return f". Did you mean {Path(url).expanduser().absolute().as_uri()}?"
