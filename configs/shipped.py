"""Tables that come with gemmtuned, by architecture: what was found best on other machines of the same kind.

They are folders like any that `gemmtuned export --format gemmtuned` writes, without binaries.  A daemon takes them as
seeds: its first search on such a device tries them before anything else, and checks and races them all the same.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import bundle
from gemmtuned.configs.hint import Hint

logger = logging.getLogger("gemmtuned.configs")
FOLDER: Final = Path(__file__).with_name("tables")


def shipped(arch: str, folder: Path = FOLDER) -> list[Hint]:
    """The rows for one architecture (`sm_90`); none where nothing is shipped, or what is there is not to be trusted."""
    table = folder / arch
    if not arch or not table.is_dir():
        return []
    try:
        return bundle.read(table).hints
    except TableError as err:
        logger.warning("shipped table left out reason=%r", str(err))
        return []
