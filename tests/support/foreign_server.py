"""A server that loads a model, forks its workers, reaps them and ends them with a signal, as gunicorn does.

    python tests/support/foreign_server.py

It asks itself for nine products.  After the fifth it writes a line and waits for one, so that whoever started it can
publish a table meanwhile.  Its last line is {answers, ends}: the nine results, and how its workers ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

import torch
from torch import nn

K, N, ROWS, WORKERS, HALF = 64, 48, 6, 3, 4


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)).eval()
    model(torch.randn(ROWS, K))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(16)
    gc.freeze()  # as gunicorn's documentation has it: no worker walks through all of torch when it ends
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until a worker knows what to do then
    workers = []
    for _ in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            serve(model, listening)
        workers.append(pid)
    answers = []
    for seed in range(9):
        answers.append(ask(listening.getsockname(), seed))
        if seed == HALF:
            print("half", flush=True)
            sys.stdin.readline()
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    ends: list[Any] = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in workers)
    try:
        os.wait()
        ends.append("one child more")
    except ChildProcessError:
        pass
    print(json.dumps({"answers": answers, "ends": ends}))


def serve(model: nn.Module, listening: socket.socket) -> None:
    """Answer requests until SIGTERM, which is an orderly end with status 7."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    torch.set_num_threads(1)  # the threads of OpenMP did not come along
    while True:
        connection, _ = listening.accept()
        with connection, torch.no_grad():
            seed = connection.recv(8)[0]
            connection.sendall(json.dumps(model(torch.full((ROWS, K), float(seed))).tolist()).encode())


def ask(address: tuple[str, int], seed: int) -> Any:
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(bytes([seed]))
        return json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))


if __name__ == "__main__":
    main()
