"""Why a device is not tuned on now: one line of what a person can do, for each reason there is."""

from __future__ import annotations

import re
from typing import Final

WAIT: Final = "nothing: it starts by itself"
# Of a device that others use: it may go on for ever, as a training run does
RESTS: Final = "end or kill -STOP them, or gemmtuned tune; it starts once they rest"

# In order; the first that is found in the reason counts.
_ADVICE: Final = (
    (r"^paused", "gemmtuned resume"),
    (r"outside the hours", "wait, or start the daemon with other --hours"),
    (r"budget of", "wait for tomorrow, or start the daemon with a larger --budget"),
    (r"--share-resident", "start the daemon with --share-resident if that program is quiet at times"),
    (r"nobody here can say", "run the daemon where it sees that program (same container or host, same user or root)"),
    (
        r"which holds the GPU, works",
        "nothing, if it serves; if it only polls the CPU, start it with GEMMTUNED=1: then its calls decide",
    ),
    (r"MIG is on", "use another GPU: slices are not tuned on"),
    (r"exclusive mode|prohibited mode", "nvidia-smi -c DEFAULT, if the machine's owner agrees"),
    (r"MPS is running", "tune on a GPU without MPS, or while it is stopped: echo quit | nvidia-cuda-mps-control"),
    (r"another gemmtuned daemon", "nothing: daemons take turns"),
    (r"MiB of memory free", "free memory on the device: the worker needs it for operands"),
    (r"memory of our own worker is not back", "wait; if it stays, look at nvidia-smi for a worker that cannot die"),
    (
        r"cannot be killed",
        "the driver holds it: reset the GPU or restart the machine; the device is left out until then",
    ),
    (r"needs an operator|wrong result for a product of ones", "look at dmesg for Xid errors; the GPU may be broken"),
    (
        r"gemmtuned was (removed|replaced) under this daemon",
        "restart the daemon; install gemmtuned again if it is not there",
    ),
    (r"next start from", "gemmtuned doctor; the worker's own words are in the reason"),
    (r"gave way \d+ times", "it is tried less often now; shorter gaps are used by: gemmtuned daemon --idle-s 2"),
    (r"is gone$", "the driver no longer lists this GPU: look at dmesg, restart the daemon when it is back"),
    (r"no answer from the driver|ended without an answer|NVML|amdsmi", "see whether nvidia-smi (amd-smi) answers"),
    (r"the driver does not say|use of the device is not known", "update the driver; not known counts as busy"),
    (r"CPU counters cannot be read", "let the daemon read /proc/stat"),
    (r"^no reading|not watched for|first look|the clock stands still", WAIT),
    (r"disk full|No space left|salvage needs", "free space there: it goes on by itself within seconds"),
    (r"schema \d+, this gemmtuned knows", "upgrade gemmtuned here and restart the daemon"),
    (r"damaged", "restart gemmtuned daemon: it looks at every page, sets the file aside and salvages it"),
    (r"store not written|database|locked|disk|schema", "gemmtuned doctor, gemmtuned db check"),
    (r"runs products", "nothing, if it serves: its quiet moments are used"),
    (r"others use|utilisation|another process computes|two processes compute|came to the GPU|others took", RESTS),
    (r"clear for|worker is starting", WAIT),
    (r"nothing to tune", "run a program with GEMMTUNED=1"),
)


def advice(reason: str) -> str:
    """What a person can do about this reason, "" for none or one we have no advice for."""
    words = re.sub(
        r"(others use|computes?|others took)([^()]*)\([^()]*\)", r"\1\2", reason
    )  # in brackets: programs' names
    return next((what for pattern, what in _ADVICE if re.search(pattern, words)), "") if words else ""
