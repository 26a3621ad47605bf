"""A program that has the system refuse calls of its own, by seccomp: it runs on, and what is lost is said.

Where the system is to kill who makes one, the program switches the hook off before.
"""

from __future__ import annotations

import errno
import platform

import pytest
from hooked import Home

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86_64")

PROGRAM = """
    import ctypes, json, struct, sys, time, torch
    from gemmtuned.hooks.activate import current
    from hooked import wait_for

    def refuse(*calls, then=0x00050001):  # from now on, in all threads: EPERM
        steps = [(0x20, 0, 0, 0)] + [(0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]
        steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, then)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(317, 1, 1, program) == 0

    def call():
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))

    flusher = current().flusher
    call()
    wait_for(lambda: flusher.calls == 1 and not flusher._pending and not flusher.in_store)
    """

REFUSED = """
    refuse(*json.loads(sys.argv[1]))
    call()
    while not flusher.complaint:  # wait_for looks at files
        time.sleep(0.01)
    print("right")
    """


@pytest.mark.parametrize(
    "calls", ["[72]", "[4, 5, 6, 262, 332]", "[72, 4, 5, 6, 262, 332]"], ids=["fcntl", "stat", "both"]
)
def test_counts_that_are_lost_because_the_system_refuses_calls_are_said_to_be(home: Home, calls: str) -> None:
    """Among them are those by which a line is kept out of a file that the program opened in the place of its stderr."""
    done = home.run(PROGRAM + REFUSED, calls)

    assert (done.code, done.out) == (0, "right\n"), done.err
    assert any(line.startswith("gemmtuned: counts stay in memory reason=") for line in done.ours)
    assert any(line.startswith("gemmtuned: counts were lost calls=1 reason=") for line in done.ours)
    assert home.calls() == 1


OPEN, PWRITE, FLOCK, FCNTL, MMAP = "[2, 257]", "[18]", "[73]", "[72]", "[9]"


@pytest.mark.parametrize(
    ("calls", "error", "advice"),
    [
        (OPEN, errno.EPERM, "seccomp"), (OPEN, errno.EACCES, "seccomp"), (OPEN, errno.EROFS, "read-only"),
        (OPEN, errno.ENOMEM, "out of memory"), (OPEN, errno.EDQUOT, "quota"), (OPEN, errno.EIO, "system log"),
        (OPEN, errno.EMFILE, "ulimit"), (OPEN, errno.ENOSYS, "does not know a call"),
        (PWRITE, errno.EPERM, "seccomp"), (PWRITE, errno.EROFS, "read-only"), (FLOCK, errno.EPERM, "seccomp"),
        (FLOCK, errno.ENOSYS, "no locks"), (FLOCK, errno.ENOMEM, "out of memory"), (FCNTL, errno.EPERM, "seccomp"),
        (MMAP, errno.EPERM, "seccomp"), (MMAP, errno.ENOMEM, "out of memory"),
    ],
)  # fmt: skip
def test_the_advice_for_a_refused_call_fits_its_error(home: Home, calls: str, error: int, advice: str) -> None:
    """The files' modes allow them all."""
    done = home.run(
        PROGRAM + REFUSED.replace("argv[1])", "argv[1]), then=0x50000 | int(sys.argv[2])"), calls, str(error)
    )

    assert (done.code, done.out) == (0, "right\n"), done.err
    said = [line for line in done.ours if "counts stay in memory" in line]
    assert 1 <= len(said) <= 2, done.ours  # a slow start can meet the refusal at another step first
    assert all(advice in line and "write access" not in line for line in said), done.ours


def test_a_program_that_has_the_system_kill_who_makes_a_call_of_ours_ends_well_where_it_switches_us_off_before(
    home: Home,
) -> None:
    """flock, fsync and fdatasync, pread64 and pwrite64, those of inotify, mkdir, rename, unlink, ftruncate."""
    switched_off = """
    gemmtuned.disable()
    refuse(73, 74, 75, 17, 18, 253, 254, 255, 294, 83, 82, 87, 77, then=0x80000000)
    call()
    time.sleep(0.3)
    print("right")
    """
    done = home.run(PROGRAM.replace("time, torch", "time, torch, gemmtuned") + switched_off, whole_end=True)

    assert (done.code, done.out) == (0, "right\n"), done.err
    assert home.calls() == 1
