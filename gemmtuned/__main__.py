"""The command `gemmtuned`, also as `python -m gemmtuned`: Ctrl-C ends it quietly from its first moment on."""

import os
import signal
import sys


def main() -> None:
    """Entry point. Exits with 130 for Ctrl-C, also in the tenths of a second in which our modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, _interrupted)
    from gemmtuned import cli

    try:
        if signal.getsignal(signal.SIGINT) is _interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        exec("")  # noqa: S102  Python remembers an interrupt in an exec, and would end `python -m` by the signal


def _interrupted(signum: int, frame: object) -> None:
    os._exit(130)  # nothing has begun that would have to be ended, and an exception could get lost in an import


if __name__ == "__main__":
    main()
