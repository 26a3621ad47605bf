"""What is said in a program that is not ours: where the line goes, and what is told once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gemmtuned.configs.stderr_lines import Once


def test_a_text_is_new_once_and_the_memory_of_texts_is_bounded() -> None:
    told = Once(most=3)

    assert [told.is_new(text) for text in "abab"] == [True, True, False, False]
    assert [told.is_new(text) for text in "cd"] == [True, True]
    assert not told.is_new("b")  # told lately
    assert told.is_new("a")  # forgotten
    for number in range(10_000):
        assert told.is_new(f"error at {number}")
    assert len(told._said) == 3


ANOTHERS = {
    "a file": "os.close(2); mine = open(path, 'w+b')",
    "a file that C opened": "os.close(2); mine = open(path, 'w+b'); os.set_inheritable(2, True)",
    "a file, after sys.stderr was closed": "sys.stderr.close(); os.close(2); mine = open(path, 'w+b')",
    "a file at the number of one before the hook": "",
    "a socket": "os.close(2); mine, other = socket.socketpair()",
}


def spoken(then: str, *, before: str = "", by_us: bool) -> tuple[str, str]:
    """(what a program finds in what it opened, its stdout and stderr), where a line is said after `then`."""
    code = f"""
import os, socket, sys, tempfile
from gemmtuned.configs import stderr_lines
path = tempfile.mkstemp()[1]
other = None
{before}
stderr_lines.begin()
{then}
if {by_us}:
    stderr_lines.our_thread()
stderr_lines.say("a word of ours")
if other is not None:
    other.setblocking(False)
    try:
        found = other.recv(100)
    except BlockingIOError:
        found = b""
else:
    found = open(path, "rb").read()
os.write(1, found + b"|")
os.unlink(path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found, _, said = done.stdout.partition("|")
    return found, said + done.stderr


@pytest.mark.parametrize("by_us", [True, False], ids=["our thread", "the program's thread"])
@pytest.mark.parametrize("what", ANOTHERS)
def test_what_the_program_opened_in_the_place_of_its_stderr_is_never_written_to(what: str, by_us: bool) -> None:
    before = "os.close(2); mine = open(path, 'w+b')" if "before the hook" in what else ""

    assert spoken(ANOTHERS[what], before=before, by_us=by_us) == ("", "")


@pytest.mark.parametrize("by_us", [True, False], ids=["our thread", "the program's thread"])
def test_what_is_still_the_programs_stderr_has_the_line(by_us: bool) -> None:
    line = "gemmtuned: a word of ours\n"
    both = "log = os.open(path, os.O_WRONLY | os.O_APPEND); keep = os.dup(1); os.dup2(log, 1); os.dup2(log, 2)"

    assert spoken("", by_us=by_us) == ("", line)
    found = subprocess.run(
        [
            sys.executable, "-c",
            "import os, sys, tempfile\nfrom gemmtuned.configs import stderr_lines\nstderr_lines.begin()\n"
            "path = tempfile.mkstemp()[1]\n"
            f"{both}\nif {by_us}: stderr_lines.our_thread()\nstderr_lines.say('a word of ours')\n"
            "os.write(keep, open(path, 'rb').read()); os.unlink(path)",
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (found.stdout, found.stderr) == (line, "")


def test_a_stream_of_the_programs_own_has_the_line_unless_it_writes_to_a_descriptor_that_is_anothers() -> None:
    assert spoken("import io; sys.stderr = io.StringIO()", by_us=False) == ("", "")
    kept = (
        "import io; keep = sys.stderr = io.StringIO(); import atexit; atexit.register(lambda: print(keep.getvalue()))"
    )
    assert spoken(kept, by_us=False) == ("", "gemmtuned: a word of ours\n\n")
    own = "class Own:\n    fileno = lambda self: 2\n    write = lambda self, text: os.write(2, text.encode())\n"
    own += "    flush = lambda self: None\nsys.stderr = Own()\n"
    assert spoken(own, by_us=False) == ("", "gemmtuned: a word of ours\n")
    assert spoken(f"{own}os.close(2)\nmine = open(path, 'w+b')", by_us=False) == ("", "")


@pytest.mark.parametrize("by_us", [False, True], ids=["the program", "our thread"])
def test_a_message_is_one_line_whatever_is_named_in_it(by_us: bool) -> None:
    code = (
        "from gemmtuned.configs import stderr_lines as s; s.begin(); "
        f"{'s.our_thread(); ' if by_us else ''}s.say('home /a\\nb\\x1b[31m/\\u00e9\\udcff')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.stderr.startswith(b"gemmtuned: home /a\\nb\\x1b[31m/") and done.stderr.count(b"\n") == 1
