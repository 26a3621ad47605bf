"""How a home stands with its fleet, for people: read without waiting for whoever writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.db.ask import ask
from gemmtuned.db.row_ids import us

_STATE: Final = """
SELECT url, live_until_us, live_until_us > :now AS reached,
    (SELECT count(*) FROM fleet_claim WHERE ours = 1 AND until_us > :now) AS claimed,
    (SELECT count(*) FROM fleet_claim WHERE ours = 0 AND until_us > :now) AS claimed_elsewhere,
    (SELECT count(*) FROM fleet_result WHERE state = 'waiting') AS waiting,
    (SELECT count(*) FROM fleet_result WHERE state = 'used') AS used,
    (SELECT count(*) FROM fleet_result WHERE state = 'refused') AS refused,
    (SELECT reason FROM fleet_result WHERE state = 'refused' ORDER BY seen_us DESC LIMIT 1) AS last_refusal
FROM fleet
"""


def fleet_state(path: Path) -> dict[str, Any] | None:
    """Where this home shares results, whether others are reached, and what is claimed, waits, in use and was refused.

    None: it shares nowhere.  live_until_us: until then a daemon leases only what it has claimed; 0: no daemon shares.
    """
    found = ask(path, _STATE, {"now": us(time.time())})
    return {**found[0], "reached": bool(found[0]["reached"])} if found else None
