"""One exchange for a running daemon, in a process of its own: python -m gemmtuned.fleet.sync_main URL [LEASE_S WORK_S].

The daemon's own process never touches the network, and is neither slowed nor stopped by it.  Says in one line of JSON
what it did, or on stderr why it could not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.priority import give_way
from gemmtuned.configs.settings import Settings
from gemmtuned.fleet.times import LEASE_S, WORK_S
from gemmtuned.fleet.wiring import exchange


def main(url: str, lease_s: float = LEASE_S, work_s: float = WORK_S) -> int:
    """Exchange once, with claims. Returns the exit code."""
    give_way(10)
    daemon = os.getppid()

    def is_left() -> bool:
        return os.getppid() != daemon

    try:
        with exchange(
            Settings.from_env(), url, claim=True, lease_s=lease_s, work_s=work_s, is_left=is_left
        ) as one:  # fmt: skip
            done = one.run(now_s=time.time())
    except GemmtunedError as err:
        sys.stderr.write(f"{err}\n")
        return err.exit_code
    sys.stdout.write(json.dumps(asdict(done)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:4])))
