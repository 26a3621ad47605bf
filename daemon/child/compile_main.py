"""CHILD of the worker: compile candidates, one a line, for a device that this process never touches.

A compiler may crash, hang, or write pages to its output: here that costs one candidate.  It does without torch, whose
import takes many times as long as Triton's.  Started by compile_ahead.Compilers and by nobody else.
"""

from __future__ import annotations

import json
import os
import sys

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.passing import with_lack
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.daemon.child.worker_main import die_with
from gemmtuned.kernels.compile_candidate import compile_candidate


def main() -> int:
    """Answer each line of standard input with why it failed, "" when it did not, until the input ends."""
    die_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for line in sys.stdin:
        job = json.loads(line)
        candidate = Candidate(job["backend"], job["config"])
        reason = compile_one(candidate, Problem.from_row(job["problem"]), Device(**job["device"]))
        answers.write(json.dumps(reason) + "\n")
        answers.flush()
    return 0


def compile_one(candidate: Candidate, problem: Problem, device: Device) -> str:
    """Why it does not compile, or "": then its binary is in the compiler's cache."""
    try:
        compile_candidate(candidate, problem, device)
    except CandidateFailed as err:
        return with_lack(str(err)[:300], err)
    except (OSError, MemoryError) as err:  # the compiler's cache or this process is at fault
        return with_lack(f"{type(err).__name__}: {err}"[:300], err)
    return ""


if __name__ == "__main__":
    sys.exit(main())
