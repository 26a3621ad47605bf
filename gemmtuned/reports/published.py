"""The database beside the published tables, in words: for status, coverage and doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gemmtuned.configs.errors import GemmtunedError, StoreError, TableError
from gemmtuned.configs.manifest import check_owner, is_whole, read_manifest
from gemmtuned.configs.published import Published, read_published
from gemmtuned.configs.settings import Settings
from gemmtuned.reports.checks import FAIL, WARN, Check
from gemmtuned.reports.render import several

NAME: Final = "published tables"
_PUBLISH: Final = "gemmtuned db publish (a running daemon does it within seconds)"
TAKE_BACK: Final = "gemmtuned db publish takes them back into it (gemmtuned daemon does so by itself)"


def standing(settings: Settings) -> Check | None:
    """What is to be said where the two differ; None where they agree, nothing is published, or it cannot be known."""
    if _agrees_at_a_glance(settings):
        return None
    try:
        published = read_published(settings.config_dir)
    except TableError as err:
        return Check(NAME, FAIL, f"programs that start now get none of them: {err}", "make the folder readable again")
    if published is None:
        return _unpublished(settings)
    if not settings.db.exists():
        rows = len(published.lines) + published.unread
        if not rows:
            return None
        found = (
            f"there is no database at {settings.db}, and generation {published.generation} is published with "
            f"{several(rows, 'solution')}: programs keep what they have"
        )
        return Check(NAME, WARN, found, TAKE_BACK.replace("takes them back into it", "makes it anew from them"))
    from gemmtuned.db.restore import look

    try:
        state = look(settings.db, published)
    except StoreError:
        return None  # the line on the database says why
    if state is None:
        return _lacks(published, len(published.lines) + published.unread)
    if state.short:
        found = (
            f"{several(state.short, 'solution')} of generation {published.generation} cannot be read, and the database "
            f"has no copy: nothing is published, programs keep the table that they hold ({published.trouble})"
        )
        fix = "put the file or a backup of the database back, or give them up: gemmtuned db publish --give-up"
        return Check(NAME, FAIL, found, fix)
    if state.lost or state.behind:
        return _lacks(published, len(state.lost))
    if published.trouble:
        try:
            check_owner(settings.config_dir)
        except TableError as err:
            return Check(NAME, FAIL, f"programs that start now refuse them: {err}", "the command in the line")
        found = f"programs that start now do not get all of it ({published.trouble}); the database has it"
        return Check(NAME, WARN, found, _PUBLISH)
    if published.generation != state.generation:
        found = (
            f"generation {published.generation} is published, the database is at {state.generation}: not yet published"
        )
        return Check(NAME, WARN, found, _PUBLISH)
    return None


def _unpublished(settings: Settings) -> Check | None:
    """What is said where no table lies, and the database has solutions for one."""
    if not settings.db.exists():
        return None
    from gemmtuned.db.restore import look

    try:
        state = look(settings.db, None)
    except StoreError:
        return None
    if state is None or not state.lines:
        return None
    found = f"nothing is published in {settings.config_dir}, the database has {several(len(state.lines), 'solution')}"
    return Check(NAME, WARN, found, _PUBLISH)


def _agrees_at_a_glance(settings: Settings) -> bool:
    """As a publisher finds that it has nothing to do: the same publication, as many rows, every file whole."""
    from gemmtuned.db.restore import shows

    try:
        manifest = read_manifest(settings.config_dir)
        if manifest is None or not manifest.store_us or not settings.db.exists():
            return False
        return shows(settings.db, manifest) and all(is_whole(settings.config_dir, file) for file in manifest.files)
    except GemmtunedError:
        return False


def notes(found: Check | None) -> Sequence[str]:
    """The same as a note below a report."""
    return [] if found is None else [f"{found.found[:1].upper()}{found.found[1:]}. To mend it: {found.fix}"]


def _lacks(published: Published, count: int) -> Check | None:
    if not count:
        return Check(
            NAME, WARN, f"the database is older than generation {published.generation}, which is published", TAKE_BACK
        )
    found = (
        f"the database lacks {count} of the published solutions (generation {published.generation}): it was "
        "lost, or an older copy was put in its place; programs keep them"
    )
    return Check(NAME, WARN, found, TAKE_BACK)
