"""Ask the daemon of a home what goes on now: one connection, one answer, nothing read from the database."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import TryLater
from gemmtuned.daemon.status_file import checked
from gemmtuned.daemon.watch.server import FILE, SCHEMA, short

ANSWER_S: Final = 2.0
MOST_BYTES: Final = 4 << 20


def ask(home: Path) -> dict[str, Any]:
    """What `server` says of now, with a notice as `read_notice` gives it. Raises TryLater in words for a person."""
    try:
        said = json.loads(_read(home / FILE))
        if not isinstance(said, dict) or said.get("schema") != SCHEMA:
            raise TryLater("the daemon is of another version than this command: restart gemmtuned daemon")
        if said["notice"] is not None:
            said["notice"] = checked(said["notice"])
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as err:
        raise TryLater("no daemon runs for this home. Start it: gemmtuned daemon") from err
    except PermissionError as err:
        raise TryLater(f"{home / FILE}: the daemon answers its own user and root alone") from err
    except TimeoutError as err:
        raise TryLater(f"the daemon does not answer within {ANSWER_S:g} s") from err
    except OSError as err:
        raise TryLater(f"{home / FILE}: {err.strerror or err}") from err
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise TryLater(f"{home / FILE}: no answer that can be read") from err
    return said


def _read(path: Path) -> bytes:
    until_s = time.monotonic() + ANSWER_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock, short(path) as name:
        sock.settimeout(ANSWER_S)
        sock.connect(name)
        parts: list[bytes] = []
        size = 0
        while part := sock.recv(1 << 16):
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES or time.monotonic() > until_s:
                raise TimeoutError
    return b"".join(parts)
