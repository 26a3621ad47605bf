"""A serving process of a fleet never touches the network: what it imports and whom it asks, under the hook."""

from __future__ import annotations

import json

from hooked import Home

PROGRAM = """
import json
import sys
import time

asked = []

def watch(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        if not isinstance(args[-1], (str, bytes)):  # a path: another program of this machine
            asked.append([event, repr(args[-1])])

sys.addaudithook(watch)
import torch
import gemmtuned
x, w = torch.randn(4, 64), torch.randn(32, 64)
for _ in range(50):
    torch.nn.functional.linear(x, w)
time.sleep(0.5)  # some flushes, and looks at the tables
far = {"obstore", "huggingface_hub", "ray", "httpx", "requests"}
far = sorted({name.split(".")[0] for name in sys.modules} & far)
near = sorted(name for name in sys.modules if name.startswith(("gemmtuned.fleet", "gemmtuned.daemon")))
print(json.dumps({"asked": asked, "far": far, "near": near}))
"""


def test_a_hooked_process_imports_nothing_of_the_fleet_and_asks_nobody(home: Home) -> None:
    done = home.run(PROGRAM, GEMMTUNED_SYNC="s3://nowhere/tables", AWS_ENDPOINT="http://127.0.0.1:9")
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1]) == {"asked": [], "far": [], "near": []}
    assert home.calls() == 50, "the hook was there"
