"""Published tables: written by the daemon, read by every running program.

    configs/manifest.json                    {schema, generation, created, files: [{name, sha256, rows}], ...}
    configs/<family>-<device>-<hash>.jsonl   one solution a row
    configs/bin/<sha256>                     compiled kernels that rows name

Here alone data becomes code, so a reader trusts a file only if it and its folder belong to root, to
the reader's own user or to the one in GEMMTUNED_TRUST, if nobody else may write them, and if its hash is in the
manifest.  Table files are named by their content and never edited; the manifest is replaced last, by rename, so that a
reader sees either the old tables or the new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from gemmtuned._testing import faults
from gemmtuned.configs import clock
from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.open_files import limit_reached, make_folders
from gemmtuned.configs.pattern import Pattern
from gemmtuned.configs.read_file import open_regular
from gemmtuned.configs.settings import MANIFEST as MANIFEST
from gemmtuned.configs.settings import trusted_uid
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.configs.temporary import temporary_path
from gemmtuned.configs.value_class import value_class

SCHEMA: Final = 1
MAX_BYTES: Final = 64 << 20
MAX_ROWS: Final = 1_000_000
MAX_GENERATION: Final = 1 << 53  # a number that every reader of JSON and SQLite can hold, and nobody reaches
BINARIES: Final = "bin"  # sub-folder of compiled kernels, each named by its hash
_OURS: Final = Pattern(r"(.+)-[0-9a-f]{16}\.jsonl")
_DIGEST: Final = Pattern(r"[0-9a-f]{64}")
_FILE_NAME: Final = Pattern(r"[a-z0-9][a-z0-9._-]{0,150}\.jsonl")


@value_class
class TableFile:
    """One published file: its name in the folder, the SHA-256 of its bytes, its number of rows."""

    name: str
    sha256: str
    rows: int


@value_class
class Manifest:
    """What is published. `created` is UTC, ISO 8601.

    store_us, when the store made this generation (0: not known), and the environments in which the solutions were
    measured, are there to restore the rows into a lost or older store.  Programs need neither.
    """

    generation: int
    created: str
    files: tuple[TableFile, ...]
    store_us: int = 0
    environments: tuple[Environment, ...] = ()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of this folder, or None when nothing was ever published there.

    Raises TableError when it cannot be trusted or is not valid.
    """
    path = folder / MANIFEST
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        raise TableError(f"{path}: cannot be read ({err.strerror})") from err
    check_owner(folder)
    try:
        raw: Any = json.loads(read_trusted(path))
    except (ValueError, RecursionError) as err:
        raise TableError(f"{path}: not valid JSON ({err}). The daemon writes it anew at its next publish") from err
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else None
        raise TableError(f"{path}: schema is {found!r}, this version reads {SCHEMA}. Upgrade gemmtuned")
    try:
        generation = raw["generation"]
        files = tuple(TableFile(f["name"], f["sha256"], f["rows"]) for f in raw["files"])
        created = str(raw["created"])
    except (KeyError, TypeError) as err:
        raise TableError(f"{path}: field {err} is missing or of a wrong type") from err
    if not isinstance(generation, int) or isinstance(generation, bool) or not 0 <= generation <= MAX_GENERATION:
        raise TableError(
            f"{path}: generation is {str(generation)[:40]}, expected an integer of 0 to {MAX_GENERATION}. "
            "The daemon writes it anew at its next publish"
        )
    for file in files:
        if not isinstance(file.name, str) or not _FILE_NAME.fullmatch(file.name):
            raise TableError(f"{path}: file name {file.name!r} is not one we write")
    store_us = raw.get("store_us")
    if not isinstance(store_us, int) or not 0 <= store_us < 1 << 62:
        store_us = 0
    return Manifest(generation, created, files, store_us, _environments(raw.get("environments")))


def _environments(found: object) -> tuple[Environment, ...]:
    """The environments that can be read; the manifest is valid without the others."""
    environments = []
    for one in found if isinstance(found, list) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            facts = one["device"]
            key, kind, name, arch = names = [str(facts[field]) for field in ("key", "kind", "name", "arch")]
            device = Device(key, kind, name, arch, min(max(int(facts["units"]), 0), 1 << 20))
            environment = Environment(device, {str(k): str(v) for k, v in dict(one["stamps"]).items()})
            if max(map(len, names)) <= 512 and len(environment.key) <= 8192:
                environments.append(environment)
    return tuple(environments)


def read_table(folder: Path, file: TableFile) -> tuple[list[Solution], list[str]]:
    """(solutions, complaints) of one published file; a bad row is left out and gives one complaint.

    Raises TableError when the file is missing, not to be trusted, or its hash is not the manifest's.
    """
    complaints: list[str] = []
    return list(solutions_of(folder, file, complaints)), complaints


def solutions_of(
    folder: Path, file: TableFile, complaints: list[str], *, pace: Callable[[Iterable[str]], Iterable[str]] = iter
) -> Iterator[Solution]:
    """The solutions of a published file, one by one; complaints are added to the list.

    pace: takes the lines and yields them, so that a program which has other work to do can pause in between.
    """
    lines = (raw.decode(errors="replace") for raw in BytesIO(_content(folder, file)))  # one by one: they are megabytes
    for number, line in enumerate(pace(lines), 1):
        try:
            solution = Solution.from_row(json.loads(line))
        except (ValueError, RecursionError, GemmtunedError) as err:  # noqa: PERF203  a bad row costs that row
            complaints.append(f"{file.name} line {number}: {err}")
        else:
            yield solution


def read_lines(folder: Path, file: TableFile) -> list[str]:
    """The lines of one published file, not parsed. Raises TableError as `read_table` does."""
    return _content(folder, file).decode(errors="replace").splitlines()


def _content(folder: Path, file: TableFile) -> bytes:
    path = folder / file.name
    data = read_trusted(path)
    if sha256(data).hexdigest() != file.sha256:
        raise TableError(f"{path}: content does not match the hash in {MANIFEST}; the old table stays in use")
    rows = data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))
    if rows != file.rows or rows > MAX_ROWS:
        raise TableError(f"{path}: {rows} rows, the manifest says {file.rows}")
    return data


def line(solution: Solution) -> str:
    """A solution as a line of a table; equal solutions give equal lines."""
    return json.dumps(solution.to_row(), separators=(",", ":"))


def stem_of(name: str) -> str | None:
    """The stem of the table to which a file of this name belongs; None when the name is none of ours."""
    match = _OURS.fullmatch(name)
    return match[1] if match else None


def write_tables(folder: Path, tables: Mapping[str, Iterable[Solution]], *, generation: int) -> Manifest:
    """Publish solutions by the stems of their tables, as `write_contents` does."""
    data: dict[str, bytes] = {}
    for stem, solutions in tables.items():
        data |= contents_of(stem, map(line, solutions))
    return write_contents(folder, data, generation=generation)


def write_contents(
    folder: Path,
    data: Mapping[str, bytes],
    *,
    generation: int,
    now_s: float | None = None,
    store_us: int = 0,
    environments: Iterable[Environment] = (),
) -> Manifest:
    """Publish: write each table under its stem plus content hash, then replace the manifest.

    Every file is written under a temporary name, synced and renamed, and then its folder is synced.  Files of the
    manifest before this one are kept for readers that have not finished; older ones are removed.  The caller holds the
    publish lock.  Raises TableError when the disk refuses.
    """
    when = datetime.fromtimestamp(clock.now_s() if now_s is None else now_s, timezone.utc)
    data = dict(sorted(data.items()))
    files = tuple(table_file(stem, content) for stem, content in data.items())
    created = when.isoformat(timespec="milliseconds")
    manifest = Manifest(generation, created, files, store_us, tuple(environments))
    try:
        make_folder(folder)
        before = _names_in_manifest(folder)
        for file, content in zip(files, data.values(), strict=True):
            if not is_whole(folder, file):
                write_whole(folder / file.name, content)
        text = json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1) + "\n"
        write_whole(folder / MANIFEST, text.encode())
    except OSError as err:
        raise TableError(f"{folder}: cannot publish ({err.strerror or err}); the old tables stay in use") from err
    keep = before | {f.name for f in files}
    for old in folder.glob("*.jsonl"):
        if old.name not in keep and stem_of(old.name) is not None:
            with contextlib.suppress(OSError):
                old.unlink()
    return manifest


def contents_of(stem: str, lines: Iterable[str]) -> dict[str, bytes]:
    """The contents of a table's files by their stems: one, or as many as it takes for each of them to be read."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for each in lines:
        data = f"{each}\n".encode()
        if size + len(data) > MAX_BYTES // 2 and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(data)
        size += len(data)
    return {f"{stem}.{number}" if number > 1 else stem: b"".join(part) for number, part in enumerate(parts, 1)}


def table_file(stem: str, content: bytes) -> TableFile:
    """The entry in a manifest of a table with this content."""
    digest = sha256(content).hexdigest()
    return TableFile(f"{stem}-{digest[:16]}.jsonl", digest, content.count(b"\n"))


def is_whole(folder: Path, file: TableFile) -> bool:
    """Whether the file is there, can be trusted, and has the hash that the manifest says."""
    try:
        return sha256(read_trusted(folder / file.name)).hexdigest() == file.sha256
    except (TableError, OSError):
        return False


def read_binary(folder: Path, digest: str) -> bytes:
    """A published kernel binary by its SHA-256. Raises TableError when it is missing or not to be trusted."""
    if not _DIGEST.fullmatch(digest):
        raise TableError(f"{folder}: binary {digest!r} is not named by a SHA-256")
    home = folder / BINARIES
    check_owner(home)
    data = read_trusted(home / digest)
    if sha256(data).hexdigest() != digest:
        raise TableError(f"{home / digest}: content does not match its name; the solution is not used")
    return data


def write_binary(folder: Path, data: bytes) -> str:
    """Keep a kernel binary in this folder's `bin`, whole or not at all; returns its SHA-256, which is its name.

    Raises TableError when the disk refuses.
    """
    digest = sha256(data).hexdigest()
    with contextlib.suppress(TableError):
        read_binary(folder, digest)
        with contextlib.suppress(OSError):  # its time is now: prune.py of the daemon removes old files without a name
            os.utime(folder / BINARIES / digest)
        return digest
    try:
        make_folder(folder)
        make_folder(folder / BINARIES)
        write_whole(folder / BINARIES / digest, data)
    except OSError as err:
        raise TableError(f"{folder / BINARIES}: cannot keep a binary ({err.strerror or err})") from err
    return digest


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner may write, whatever the umask."""
    if not folder.is_dir():
        make_folders(folder)
        folder.chmod(0o755)


def _names_in_manifest(folder: Path) -> set[str]:
    try:
        manifest = read_manifest(folder)
    except TableError:
        return set()
    return {f.name for f in manifest.files} if manifest else set()


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that no reader and no power cut sees a part of it. Raises OSError."""
    temporary = temporary_path(path)
    faults.point("publish.open")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            os.fchmod(fd, 0o644)
            view = memoryview(data)
            while view:
                faults.point("publish.write")
                view = view[os.write(fd, view) :]
            faults.point("publish.fsync")
            os.fsync(fd)
        finally:
            os.close(fd)
        faults.point("publish.rename")
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        faults.point("publish.fsync_folder")
        os.fsync(folder)
    finally:
        os.close(folder)


def read_trusted(path: Path) -> bytes:
    """A file that nobody but root, this user or one it trusts can have written. Raises TableError for any other."""
    try:
        faults.point("load.open")
        fd, facts = open_regular(path, os.O_NOFOLLOW)
    except OSError as err:
        raise TableError(f"{path}: cannot be opened ({limit_reached(err) or err.strerror})") from err
    with os.fdopen(fd, "rb") as file:
        _check_mode(path, facts)
        if facts.st_size > MAX_BYTES:
            raise TableError(f"{path}: {facts.st_size} bytes, at most {MAX_BYTES} are read")
        return file.read(MAX_BYTES + 1)


def check_owner(folder: Path) -> None:
    """Raise TableError for a file that others than root, this user or one it trusts can write, or put files into."""
    try:
        _check_mode(folder, folder.stat())
    except OSError as err:
        raise TableError(f"{folder}: cannot be read ({err.strerror})") from err


def _check_mode(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (0, os.geteuid()) and facts.st_uid != trusted_uid():
        raise TableError(
            f"{path} belongs to uid {facts.st_uid}, not to root or you: refused. Set GEMMTUNED_TRUST={facts.st_uid} if "
            "the daemon of this machine runs as that user, else GEMMTUNED_CONFIG_DIR to a folder of your own"
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TableError(f"{path} can be written by others: refused. Run: chmod go-w {path}")
