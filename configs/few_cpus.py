"""Products of more threads than this process has CPUs of its machine: times of theirs say nothing of a program's.

A daemon may be held to a few CPUs (taskset, a cpuset) while programs run on all of them.  Of two threads on a CPU each
waits for the other, so a kernel that wins there may lose where both run.  Where a process may use the whole machine,
more threads than CPUs are what the program has, too.
"""

from __future__ import annotations

from gemmtuned.configs.numbers import whole
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import child_env
from gemmtuned.configs.unpatched import os


def most_threads() -> int:
    """The most threads of a product that can be timed in this process; 0: any number."""
    at_once = whole(child_env().get("OMP_THREAD_LIMIT", "")) or 0  # OpenMP begins no more, whatever is asked for
    try:
        usable, there = len(os.sched_getaffinity(0)), os.sysconf("SC_NPROCESSORS_ONLN")
    except (AttributeError, OSError, ValueError):  # not on every system
        usable = there = 0
    return min(filter(None, (usable if usable < there else 0, at_once)), default=0)


def too_few(problem: Problem) -> str:
    """Why this process cannot time it, and what helps; "" where it can, and for problems of GPUs."""
    most = most_threads()
    if not most or problem.threads <= most:
        return ""
    return (
        f"it takes {problem.threads} threads, and what tunes here may run {most} at once on the machine's CPUs: give "
        "it more (taskset, a cpuset, OMP_THREAD_LIMIT)"
    )
