"""Configs of kernels/triton/direct.py against today's: python benchmarks/direct.py FOLDER SECONDS (run before it was formatted, from the root)."""

import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from unittest.mock import patch

import dense

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon import search
from gemmtuned.daemon.options import SearchOptions
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import direct, gemv, shortlist

out = Path(sys.argv[1])
until = time.monotonic() + float(sys.argv[2])
here = environment(cuda_device(0))
units = here.device.units
random.seed(1)


def cands(p):
    kinds = []
    if p.m == 1:
        kinds += [("gemv", c) for _, c in gemv.scored(1, p.n, p.k, units)]
        kinds += [("direct", c) for _, c in direct.scored(1, p.n, p.k, units)[:6]]
    else:
        d = direct.scored(p.m, p.n, p.k, units)
        rest = d[24:]
        random.shuffle(rest)
        kinds += [("direct", c) for _, c in d[:24] + rest[:24]]
        kinds += [(k, c) for k, c in shortlist.shortlist(p.m, p.n, p.k, units, arch="sm_90") if k != "skinny"][:12]
    return [Candidate.of("triton", kernel=k, **c) for k, c in kinds]


probs = [Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced") for m in (8, 4, 16) for n, k in dense.EIGHT]
probs += [Problem(m=1, n=n, k=k, dtype="bf16", math_mode="reduced") for n, k in dense.EIGHT + dense.TWELVE]
probs += [
    Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
    for m in (8, 32)
    for n, k in ((8192, 1024), (5120, 2880), (6400, 5120), (28672, 4096))
]
table = {p: cands(p) for p in probs}
ahead = dense.Ahead(probs, here, lambda p: table[p])
f = (out / "try_direct.jsonl").open("w")
for p in probs:
    if time.monotonic() > until:
        break
    c = ahead.wait(p)
    t0 = time.monotonic()
    with patch.object(search, "FINALISTS", 4):
        r = dense.tune(p, here, SearchOptions(only=tuple(table[p])))
    t, o, fl = 0, 0, 0
    us = dense.race_again(p, r["solution"])
    scr = {}
    for x in r["trials"]:
        if x.phase == "screen" and x.us:
            scr[str(x.candidate)] = round(x.us, 3)
    fails = [str(x.candidate)[:120] + " " + str(getattr(x, "reason", ""))[:80] for x in r["trials"] if not x.us][:3]
    best = {}
    for s, u in scr.items():
        k = json.loads(s[7:])["kernel"] if s.startswith("triton") else s.split()[0]
        if k not in best or u < best[k][0]:
            best[k] = (u, s[7:].replace('"', ""))
    f.write(json.dumps({"m": p.m, "n": p.n, "k": p.k, **us, "screened": scr}) + "\n")
    f.flush()
    print(
        p.m,
        p.n,
        p.k,
        "floor %.2f torch %.2f ours %.2f ratio %.3f over %.3f"
        % (us["floor_us"], us["torch_us"], us["us"], us["ratio"], us["us"] / us["floor_us"]),
        {k: v[0] for k, v in best.items()},
        best.get("direct", best.get("gemv", ("", "")))[1],
        len(scr),
        "c%.1f t%.1f" % (c, time.monotonic() - t0),
        fails[:1],
        flush=True,
    )
os._exit(0)
