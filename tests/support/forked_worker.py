"""Workers of a daemon in forks of the process that has torch imported (fork_server.py): the fixture `forked_workers`.

A daemon waits for its worker as its child, which such a fork is not.  So its child is this program, which asks for the
fork, hands signals on to it and ends as it does; a worker ends when its daemon hangs up, whatever becomes of this
program.  Tests of how a worker starts, and what it imports, have a worker of their own.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType

PROGRAM = """
import os, sys
from gemmtuned.daemon.child import worker_main
os.chdir("/")
sys.exit(worker_main.main(["3", *sys.argv[1:], "--parent", str(os.getppid())]))
"""


def main() -> None:
    """Arguments: the sockets of the server and of the daemon, where CPU seconds are written, and the worker's own."""
    orders, daemon, used = map(int, sys.argv[1:4])
    answers, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = {"code": PROGRAM, "args": sys.argv[4:], "env": dict(os.environ), "whole_end": False}
    with socket.socket(fileno=orders) as server:
        socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2, its.fileno(), daemon])
    its.close()
    os.close(daemon)
    pid = json.loads(answers.recv(4096))["pid"]

    def hand_on(number: int, frame: FrameType | None) -> None:
        os.killpg(pid, number)

    signal.signal(signal.SIGTERM, hand_on)
    end = json.loads(answers.recv(4096))
    os.write(used, f"{end['cpu_s']}\n".encode())
    if end["status"] < 0:
        if end["status"] != -signal.SIGKILL:
            signal.signal(-end["status"], signal.SIG_DFL)
        os.kill(os.getpid(), -end["status"])
    sys.exit(end["status"])


if __name__ == "__main__":
    main()
