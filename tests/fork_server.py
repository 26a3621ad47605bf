"""A process that has imported torch, unhooked, and forks a program whenever it is asked: saves two seconds a test.

The program runs as after `import torch` under its own environment: the entry point is called as torch calls it, and
the interpreter ends as it always does, but that the hook may take its time: on a loaded machine half a second is not
enough to make a database.  Tests of the limits themselves start programs of their own.

Speaks JSON lines on its standard input and output: {code, args, env, out, err} in, {pid} and then {status} back.
"""

import json
import os
import sys
from contextlib import suppress

import torch  # noqa: F401  what it is all about


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        with suppress(OSError):
            os.setpgid(pid, pid)  # by both, whoever is first: at a timeout the group is killed with all in it
        if pid == 0:
            become(order)
            return
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


def become(order: dict) -> None:
    for fd, path, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, order["out"], os.O_WRONLY | os.O_CREAT),
        (2, order["err"], os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:0] = [p for p in order["env"]["PYTHONPATH"].split(os.pathsep) if p not in sys.path]
    sys.argv = ["-c", *order["args"]]
    from gemmtuned._autoload import autoload

    autoload()
    flush = sys.modules.get("gemmtuned.hooks.flush")
    if flush is not None:
        flush.EXIT_S = flush.EXIT_BUSY_S = 60.0
    exec(compile(order["code"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
