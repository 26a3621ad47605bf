"""A public repository of tables: a folder of results that anybody can host, review and take from, as data alone.

    fleet.json                      marks it: hosts send results here, and neither counts nor claims
    README.md, LICENSE              the data card and the terms
    .ci/check                       what a pull request must pass: `sh .ci/check`, called by .github/workflows/check.yml
    results/...                     as at any other URL (layout.py)

`gemmtuned fleet init` writes it, and this file reads it: with the standard library alone, so that a check needs
neither torch nor the hub (`pip install --no-deps gemmtuned && python -m gemmtuned.fleet.tables FOLDER`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.fleet import record
from gemmtuned.fleet.layout import RESULTS

if TYPE_CHECKING:
    from gemmtuned.fleet.objects import Objects

MARK: Final = "fleet.json"
SCHEMA: Final = 1
MAX_MARK: Final = 4096
TEMPLATES: Final = Path(__file__).with_name("repository")
NEEDED: Final = (MARK, "README.md", "LICENSE")
_OTHERS: Final = re.compile(r"README\.md|LICENSE|CONTRIBUTING\.md|\.gitattributes|\.gitignore|\.ci/check|\.github/.*")
_LICENCE: Final = re.compile(r"^---\n(?:.*\n)*?license: \S", re.MULTILINE)


def is_repository(objects: Objects) -> bool:
    """Whether a URL takes results alone: so says the mark that lies there (at hf:// always). Raises TryLater."""
    try:
        data = objects.get(MARK, limit=MAX_MARK)
    except TableError:  # it is none of ours
        return False
    return data is not None and _is_mark(data)


def files(title: str, holder: str, year: int) -> dict[str, bytes]:
    """What a new repository holds, by name."""
    found = {MARK: record.canonical({"schema": SCHEMA, "takes": "results"}) + b"\n"}
    for path in sorted(TEMPLATES.rglob("*")):
        if path.is_file():
            name = path.relative_to(TEMPLATES).as_posix().replace("dot-", ".")
            text = path.read_text()
            for word, value in (("TITLE", title), ("HOLDER", holder), ("YEAR", str(year))):
                text = text.replace(f"@{word}@", value)
            found[name] = text.encode()
    return found


def check(folder: Path, *, base: str = "") -> Iterator[str]:
    """What is wrong with a repository that lies in this folder, file by file; nothing when it is sound.

    base: a git revision; results that were there may neither be changed nor removed since.
    """
    for name in NEEDED:
        if not (folder / name).is_file():
            yield f"{name}: missing"
    mark = folder / MARK
    if mark.is_file() and not _is_mark(mark.read_bytes()[:MAX_MARK]):
        yield f"{MARK}: expected {json.dumps({'schema': SCHEMA, 'takes': 'results'})}"
    card = folder / "README.md"
    if card.is_file() and not _LICENCE.match(card.read_text(errors="replace")):
        yield "README.md: it does not begin with a data card that names a license"
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield f"{name}: a link"
        elif name.startswith(f"{RESULTS}/"):
            yield from _wrong_result(path, name)
        elif name != MARK and not _OTHERS.fullmatch(name):
            yield f"{name}: neither a result nor one of the repository's own files"
    if base:
        yield from _changed(folder, base)


def _files(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        links = [name for name in folders if (Path(top) / name).is_symlink()]
        yield from (Path(top) / name for name in sorted((*names, *links)))


def _wrong_result(path: Path, name: str) -> Iterator[str]:
    if path.stat().st_size > record.MAX_BYTES:
        yield f"{name}: {path.stat().st_size} bytes, at most {record.MAX_BYTES} are read"
        return
    try:
        record.read(name, path.read_bytes(), key=None)
    except TableError as err:
        yield str(err)


def _changed(folder: Path, base: str) -> Iterator[str]:
    command = [
        "git",
        "-C",
        str(folder),
        "diff",
        "--name-only",
        "--diff-filter=MDTR",
        "--no-renames",
        base,
        "--",
        RESULTS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"git diff {base}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
    for name in done.stdout.splitlines():
        yield f"{name}: changed or removed since {base}; results are added and never changed"


def _is_mark(data: bytes) -> bool:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("schema") == SCHEMA and found.get("takes") == "results"


def main(arguments: Sequence[str]) -> int:
    """python -m gemmtuned.fleet.tables FOLDER [BASE]. Returns 1 and says what is wrong, or 0."""
    folder, base = Path(arguments[0]), arguments[1] if len(arguments) > 1 else ""
    wrong = list(check(folder, base=base))
    results = sum(1 for path in (folder / RESULTS).rglob("*.json"))
    sys.stdout.write("".join(f"{line}\n" for line in wrong) or f"{results} results, all as they should be\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
