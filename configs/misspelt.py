"""Variables that are named as ours are and that nobody reads: each with the one that is probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from gemmtuned.configs.variables import AITER_CONFIGS, VARIABLES

# "Discovering services" in Kubernetes' documentation: of a service, and as Docker's links had them
_OF_A_SERVICE: Final = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$"
)


_ALMOST_OURS: Final = re.compile(r"GEM+_?TUN+ED?(?=_|$)")  # GEMTUNED, GEMM_TUNED, and `gemmtuned` in small letters


def misspelt(given: Iterable[str]) -> dict[str, str]:
    """The GEMMTUNED_* and AITER_* names that nothing reads, each with the one that is meant; "" where none is near.

    So is a name that begins almost as ours do, GEMTUNED_HOME; what else begins with GEM is another program's.

    AITER has variables of its own: of those named AITER_*, only what is very near one of our switches.  Those that
    Kubernetes sets in each container beside a service called gemmtuned were set by nobody.
    """
    known = {variable.name.partition("_")[2]: variable.name for variable in VARIABLES if "_" in variable.name}
    switches = [part for part, name in known.items() if name.startswith("AITER_") and name not in AITER_CONFIGS]
    meant = {}
    for name in sorted(given):
        if name in known.values() or _OF_A_SERVICE.search(name):
            continue
        # compared without the prefix: with it, any two names are alike
        prefix, _, part = _ALMOST_OURS.sub("GEMMTUNED", name.upper(), count=1).partition("_")
        ours = prefix == "GEMMTUNED"
        if not ours and prefix != "AITER":
            continue
        if not part:
            meant[name] = "GEMMTUNED"
            continue
        import difflib  # a program without a mistake needs none of it

        found = difflib.get_close_matches(part, known if ours else switches, n=1, cutoff=0.6 if ours else 0.85)
        if ours or found:
            meant[name] = known[found[0]] if found else ""
    return meant
