"""What a child process of ours writes to its output: kept for its last line, which tells why it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
from typing import IO, Final

MOST_OUTPUT_BYTES: Final = 1 << 20  # only its last line is ever shown


def output_file() -> IO[bytes] | None:
    """A file without a name; None where the disk has no room for one."""
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed by its owner
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # the child's, too: `cut` may shorten it at any time
        return file
    except OSError:  # a full disk must not keep us from tuning
        return None


def cut(output: IO[bytes] | None) -> None:
    """Keep but the end of it: some libraries can be told to write a line for each call (ONEDNN_VERBOSE)."""
    if output is None or output.closed:
        return
    with contextlib.suppress(OSError):
        size = os.fstat(output.fileno()).st_size
        if size > MOST_OUTPUT_BYTES:
            last = os.pread(output.fileno(), 4096, size - 4096)
            os.ftruncate(output.fileno(), 0)
            os.write(output.fileno(), last)


def last_line(output: IO[bytes] | None) -> str:
    """The last line with something in it, printable; "" where there is none."""
    if output is None or output.closed:
        return ""
    try:
        end = output.seek(0, os.SEEK_END)
        output.seek(max(end - 4096, 0))
        lines = output.read(4096).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(c if c.isprintable() else "?" for c in text)[:300]


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35` of one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
