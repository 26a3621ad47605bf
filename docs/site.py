"""Build the pages of docs/ as a site: `python docs/site.py OUT`, `make docs`.

The pages are plain Markdown whose links work in the repository.  Here they are copied beside README.md, which becomes
the first page, and what they link to outside docs/ (programs, result files) is copied with them, so that no link of
the site leads elsewhere.  Zensical turns the copy into HTML by mkdocs.yml, and MkDocs could.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
PAGES: Final = {ROOT / "README.md": "index.md", **{path: str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}}
LINK: Final = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
_FILES: Final = "files"  # the site's folder for what lies outside docs/


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor or "") of each link of a page that leads into this repository; code boxes have none."""
    for _, target, anchor, _ in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)):
        if not re.match(r"[a-z]+:", target):
            yield (page.parent / target).resolve() if target else page, anchor[1:]


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub and the site make them; of two equal ones the first."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.*)$", text, re.M)}


def slug(heading: str) -> str:
    """A heading's anchor."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def site_path(target: Path) -> str:
    """Where a file of the repository lies in the copy; of a folder, the list of its files."""
    if target in PAGES:
        return PAGES[target]
    if target.is_dir():
        return f"{_FILES}/{target.relative_to(ROOT)}/list.txt"
    return str(target.relative_to(DOCS)) if target.is_relative_to(DOCS) else f"{_FILES}/{target.relative_to(ROOT)}"


def copy(to: Path) -> None:
    """Every page with its links turned, and what they lead to, pages outside docs/ among it."""
    waiting, seen = list(PAGES), set(PAGES)
    while waiting:
        source = waiting.pop()
        written = to / site_path(source)
        written.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            names = (str(path.relative_to(source)) for path in source.rglob("*") if "__pycache__" not in path.parts)
            written.write_text("\n".join(sorted(names)) + "\n")
        elif source.suffix == ".md":
            written.write_text(LINK.sub(lambda found, page=source: _turned(found, page), source.read_text()))
            new = {target for target, _ in links(source)} - seen
            seen |= new
            waiting += new
        else:
            shutil.copyfile(source, written)


def _turned(found: re.Match[str], page: Path) -> str:
    before, target, anchor, after = found.groups(default="")
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    written = site_path((page.parent / target).resolve())
    return f"{before}{os.path.relpath(written, Path(site_path(page)).parent)}{anchor}{after}"


def main() -> None:
    """Copy, then have Zensical build; both anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    copy(out / "docs")
    shutil.copyfile(DOCS / "mkdocs.yml", out / "mkdocs.yml")
    zensical = Path(sys.executable).with_name("zensical")
    sys.exit(subprocess.run([str(zensical), "build", "--clean"], cwd=out, check=False).returncode)


if __name__ == "__main__":
    main()
