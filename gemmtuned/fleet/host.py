"""Who we are in a fleet: a name for people, and eight random digits that no other home has."""

from __future__ import annotations

import os
import platform
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.read_file import read_regular, read_small
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import slug
from gemmtuned.configs.temporary import temporary_path

DIGITS: Final = "fleet-host"  # file of the home
MIN_KEY: Final = 16  # bytes
MAX_KEY: Final = 4096


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose results are looked at. key: what results are signed with; None: they need no signature.

    hosts: patterns that a host's name must match; none: any host.
    """

    key: bytes | None = None
    hosts: Sequence[str] = ()

    def allows(self, host: str) -> bool:
        """Whether a host of this name is listened to."""
        return not self.hosts or any(fnmatch(host, pattern) for pattern in self.hosts)


def host_name(settings: Settings) -> str:
    """Our name: that of GEMMTUNED_SYNC_NAME, or the machine's, and digits that are made once for each home."""
    return f"{slug(settings.sync_name or platform.node(), 60)}-{_digits(settings.home / DIGITS)}"


def trust(settings: Settings) -> Trust:
    """As the variables say. Raises SettingError for a key that cannot be used."""
    return Trust(None if settings.sync_key is None else _key(settings.sync_key), settings.sync_hosts)


def _digits(path: Path) -> str:
    try:
        found = read_small(path, 8)
    except OSError:
        found = ""
    if re.fullmatch("[0-9a-f]{8}", found):
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    new = temporary_path(path)
    try:
        new.write_text(secrets.token_hex(4))
        os.link(new, path)  # where two begin at once, one wins
    except FileExistsError:
        if not re.fullmatch("[0-9a-f]{8}", read_small(path, 8)):
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return read_small(path, 8)


def _key(path: Path) -> bytes:
    try:
        facts = path.stat()
        key = read_regular(path, MAX_KEY + 1).strip()
    except OSError as err:
        raise SettingError(f"GEMMTUNED_SYNC_KEY: {path} cannot be read ({err.strerror or err})") from err
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingError(f"GEMMTUNED_SYNC_KEY: {path} is open to others. Run: chmod 600 {path}")
    if not MIN_KEY <= len(key) <= MAX_KEY:
        raise SettingError(f"GEMMTUNED_SYNC_KEY: {path} has {len(key)} bytes, expected {MIN_KEY} to {MAX_KEY}")
    return key
