"""What a child process of ours writes to its output: kept for its last line, which tells why it ended."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import tempfile
from typing import IO, Final

MOST_OUTPUT_BYTES: Final = 1 << 20  # only its last line is ever shown
LONGEST_BYTES: Final = 1 << 30  # with the part whose room was given back
_KEPT_BYTES: Final = 4096


def output_file() -> IO[bytes] | None:
    """A file without a name; None where the disk has no room for one."""
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed by its owner
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # the child's, too: `cut` may shorten it at any time
        return file
    except OSError:  # a full disk must not keep us from tuning
        return None


def cut(output: IO[bytes] | None) -> None:
    """Keep but the end of it: some libraries can be told to write a line for each call (ONEDNN_VERBOSE).

    The room of its beginning is given back, and the file stays as long as it is: shortening it would lose what the
    child writes at that moment, which may be why it dies.  Only where the file system has no holes, or once the file is
    LONGEST_BYTES long, is it shortened all the same.
    """
    if output is None or output.closed:
        return
    with contextlib.suppress(OSError):
        status = os.fstat(output.fileno())
        too_long = status.st_size > LONGEST_BYTES  # some file systems do not tell how much room it takes
        if not too_long and status.st_blocks * 512 <= MOST_OUTPUT_BYTES:
            return
        if too_long or not _emptied(output.fileno(), status.st_size - _KEPT_BYTES):
            last = os.pread(output.fileno(), _KEPT_BYTES, status.st_size - _KEPT_BYTES)
            os.ftruncate(output.fileno(), 0)
            os.write(output.fileno(), last)


def _emptied(file: int, upto: int) -> bool:
    """Give back the room of a file's whole pages before `upto`. False: its file system cannot."""
    try:
        first = os.lseek(file, 0, os.SEEK_DATA)
        first -= first % mmap.ALLOCATIONGRANULARITY
        length = (upto - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            with mmap.mmap(file, length, offset=first) as pages:
                pages.madvise(mmap.MADV_REMOVE)
        return True
    except (OSError, ValueError):
        return False


def last_line(output: IO[bytes] | None) -> str:
    """The last line with something in it, printable; "" where there is none."""
    if output is None or output.closed:
        return ""
    try:
        end = output.seek(0, os.SEEK_END)
        output.seek(max(end - _KEPT_BYTES, 0))
        lines = output.read(_KEPT_BYTES).decode("utf-8", errors="replace").splitlines()
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
