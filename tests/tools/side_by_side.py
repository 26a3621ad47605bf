"""Tests in forks of the process that has collected them: `pytest --side-by-side 5`, as `make test` does it.

Importing torch and all test files and listing thousands of tests takes ten seconds of CPU time.  It is done once here,
and then this process forks: each fork runs what it is told, one test after another, and sends home what there is to
report.  Before them one fork alone runs the tests with the marker `alone`, which watch the machine, and then two forks
those with the marker `timed`, which have short limits of time and mostly wait.

Each fork takes a file at a time, so that what a file's tests share is made once: first the files in which a test is
marked `slow`, then those with fewest tests, as many short ones are to be left at the end: when no file is left, a fork
takes half of what another has still to do.  A fork that dies fails the test that it was at, and another one goes on.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

import pytest

NAME: Final = "PYTEST_SIDE_BY_SIDE"  # in a fork's environment: which one it is


def folder_of_all(factory: pytest.TempPathFactory) -> Any:
    """The folder of this run that all its forks have in common; each has one of its own in it."""
    own = factory.getbasetemp()
    return own.parent if NAME in os.environ else own


def portions(items: list[pytest.Item], indices: Iterable[int]) -> deque[list[int]]:
    """The indices of tests, file by file, in the order in which the files are begun."""
    files = [list(group) for _, group in groupby(indices, key=lambda i: items[i].path)]
    dear = [any(items[i].get_closest_marker("slow") for i in file) for file in files]
    ordered = sorted(range(len(files)), key=lambda n: (not dear[n], len(files[n])))
    return deque(files[n] for n in ordered)


@dataclass
class Fork:
    """One that runs tests, as its parent sees it.

    ended: readable once it is gone.  told: what it has been told to run, at most two.  left: what it does after that.
    """

    pid: int
    line: Connection
    ended: int
    told: deque[int] = field(default_factory=deque)
    left: deque[int] = field(default_factory=deque)
    at_end: bool = False


class SideBySide:
    """The plugin: runs all that was collected. count: how many forks there are."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._forked = 0

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_collection(self) -> Iterator[None]:
        """See that no test file starts threads when it is imported: forks would not have them, and wait for them."""
        before = len(os.listdir("/proc/self/task"))
        yield
        begun = len(os.listdir("/proc/self/task")) - before
        if begun > 0:
            raise pytest.UsageError(f"{begun} threads were begun while test files were imported: forks would hang")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        _factory(session).getbasetemp()  # made here, once: each fork has a folder in it
        items = session.items
        alone, timed = ([i for i, item in enumerate(items) if item.get_closest_marker(n)] for n in ("alone", "timed"))
        first = {*alone, *timed}
        self._run(session, portions(items, alone), 1)
        self._run(session, deque([i] for i in timed if i not in alone), min(2, self._count))
        self._run(session, portions(items, [i for i in range(len(items)) if i not in first]), self._count)
        return True

    def _run(self, session: pytest.Session, files: deque[list[int]], count: int) -> None:
        """Run these files' tests in so many forks."""
        forks: list[Fork] = []
        try:
            while files or forks:
                for _ in range(min(count - len(forks), len(files))):
                    fork = self._fork(session)
                    forks.append(fork)
                    self._tell(fork, files, forks)
                wait([end for fork in forks for end in (fork.line, fork.ended)])
                for fork in [*forks]:
                    ended = bool(wait([fork.ended], 0))  # looked at first: what it has said before is in the line
                    while fork.line.poll():
                        try:
                            said = fork.line.recv()
                        except (EOFError, ConnectionResetError):
                            break
                        for kind, *what in said:
                            _heard(session, kind, what)
                        if fork.told:  # the last of all are of what was torn down in the end
                            fork.told.popleft()
                            self._tell(fork, files, forks)
                    if ended:
                        forks.remove(fork)
                        self._ended(session, fork, files)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for fork in forks:  # cut off: each ends with the test that it is at
                fork.line.close()
            for fork in forks:
                os.waitpid(fork.pid, 0)
                os.close(fork.ended)

    def _tell(self, fork: Fork, files: deque[list[int]], forks: Iterable[Fork]) -> None:
        """Tell a fork what to run, always two at once: what both tests share is kept."""
        while len(fork.told) < 2 and not fork.at_end:
            if not fork.left:
                fork.left.extend(files.popleft() if files else _half_of_most(forks))
            fork.at_end = not fork.left
            with suppress(BrokenPipeError):  # it is gone, which its line says next
                fork.line.send(None if fork.at_end else fork.left[0])
            if not fork.at_end:
                fork.told.append(fork.left.popleft())

    def _fork(self, session: pytest.Session) -> Fork:
        here, there = Pipe()
        name = f"fork{self._forked}"
        self._forked += 1
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # Python 3.12 warns of OpenBLAS's threads, which OpenBLAS minds itself
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            there.close()
            return Fork(pid, here, os.pidfd_open(pid))
        status = 1
        try:
            here.close()
            _become(session, name)
            _work(session, there)
            atexit._run_exitfuncs()
            status = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _ended(self, session: pytest.Session, fork: Fork, files: deque[list[int]]) -> None:
        """A fork is gone: where it had a test to run, that one has failed, and the others are another one's."""
        status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        os.close(fork.ended)
        fork.line.close()
        if fork.told:
            item = session.items[fork.told.popleft()]
            said = f"the process that ran {item.nodeid} ended with {status} (negative: by this signal)"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
            session.config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            session.config.hook.pytest_runtest_logreport(report=report)
        rest = [*fork.told, *fork.left]
        if rest:
            files.appendleft(rest)


def _factory(session: pytest.Session) -> pytest.TempPathFactory:
    factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    return factory


def _half_of_most(forks: Iterable[Fork]) -> list[int]:
    """The later half of what that fork has left which has most."""
    most = max(forks, key=lambda fork: len(fork.left)).left
    return [most.pop() for _ in range((len(most) + 1) // 2)][::-1]


def _heard(session: pytest.Session, kind: str, what: list[Any]) -> None:
    """Tell pytest what a fork has said, as if it had been here."""
    hook = session.config.hook
    if kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=what[0])
        if report.when == "setup":
            hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
        hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
    elif kind == "warning":
        message, *others = what
        kept = warnings.WarningMessage(**message)
        names = ("when", "nodeid", "location")
        hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": kept, **dict(zip(names, others, strict=True))}
        )


# --- in a fork


class _Says:
    """What a fork reports, its parent hears: all of a test at once, when it is over."""

    def __init__(self, config: pytest.Config, line: Connection) -> None:
        self._config, self._line = config, line
        self._heard_it_all = False
        self._said: list[tuple[Any, ...]] = []

    def tell(self) -> None:
        self._line.send(self._said)
        self._said = []

    def pytest_runtest_logstart(self) -> None:
        """From here on warnings are this fork's: pytest tells each new plugin those that were before."""
        self._heard_it_all = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._said.append(
            ("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
        )

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self._heard_it_all:
            return
        category: type[Warning] = warning_message.category
        try:
            pickle.dumps(category)
        except Exception:  # one that a test has made
            category = UserWarning
        facts = {"message": str(warning_message.message), "category": category}
        facts |= {"filename": warning_message.filename, "lineno": warning_message.lineno}
        self._said.append(("warning", facts, when, nodeid, location))


def _become(session: pytest.Session, name: str) -> None:
    """Have a folder, a capture of output and a terminal of one's own; the terminal is nowhere."""
    os.environ[NAME] = name
    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture.is_globally_capturing():
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115  open as long as this process is
    atexit._clear()  # what the parent does at its end
    factory = _factory(session)
    folder = factory.getbasetemp() / name
    folder.mkdir(mode=0o700)
    factory._basetemp = folder


def _work(session: pytest.Session, line: Connection) -> None:
    """Run what comes over the line, until there is nothing more; where the parent is gone, too."""
    config = session.config
    says = _Says(config, line)
    config.pluginmanager.register(says, "says")
    try:
        at = line.recv()
        while at is not None:
            after = line.recv()
            following = None if after is None else session.items[after]
            config.hook.pytest_runtest_protocol(item=session.items[at], nextitem=following)
            says.tell()
            at = after
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        session._setupstate.teardown_exact(None)
        with suppress(BrokenPipeError, ConnectionResetError):
            says.tell()
