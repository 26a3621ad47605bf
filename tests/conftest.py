"""Fixtures and hooks of all tests; pyproject.toml puts support/ and tools/, and no other folder, on the path."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import caught_logs
import pytest
from cpu_times import CpuTimes, add
from fake_cuda_build import KEPT
from forked import COMPILER
from hooked import HERE, ForkServer, Home
from left_to_soak import COUNTS, counted
from side_by_side import SideBySide

from gemmtuned import cli
from gemmtuned.configs.cpu_wait import CpuWait
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats import worker
from gemmtuned.hooks.native.build import build, find_built
from gemmtuned.hooks.probation import pages_of

# No test writes to the user's home or cache, nor does what it starts: without a home of its own it is in nobody's, and
# fails; the cache is one of this checkout
USERS_CACHE: Final = Settings.from_env().cache
NOBODYS: Final = KEPT / "home-of-nobody"
os.environ.update(XDG_STATE_HOME=str(NOBODYS), XDG_CACHE_HOME=str(KEPT / "cache"))
for name in ("GEMMTUNED_HOME", "GEMMTUNED_DB", "GEMMTUNED_CACHE"):
    os.environ.pop(name, None)

# What is compiled once is kept, here and in every program that a test starts: it is a fifth of the time otherwise
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SOAK_S: Final = 3600
MOST_WITHOUT_COMPILER: Final = 1000  # tests; with more of them each fork would import torch's, for 2.5 s of CPU time
# What most forks would import by and by, a second of CPU time each; without one of them, its tests are left out
BY_AND_BY: Final = (
    "torch._inductor.config", "torch._inductor.debug", "pandas", "sqlite_utils", "typer._adapters",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
SERVER: Final = pytest.StashKey[ForkServer]()  # of programs in forks, which all forks of pytest ask
GARBAGE: Final = (20_000, 20, 100)  # objects before a collection; Python's own are 700 (2,000), 10, 10
# Files whose tests watch the machine: `make test` runs them by themselves, before all others side by side, as it does
# with single tests that have the marker `alone`
ALONE: Final = frozenset(("test_daemon_cpu_wait", "test_daemon_devices"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say what this project's runs can be asked for."""
    parser.addoption("--cpu-times", type=Path, help="write the CPU seconds of each test to this file, as JSON lines")
    parser.addoption("--side-by-side", type=int, default=0, metavar="N", help="run tests in N forks of this process")


def pytest_configure(config: pytest.Config) -> None:
    """Measure each test, and run tests in forks where that is asked for."""
    caught_logs.take_place()
    config.pluginmanager.register(CpuTimes(config.getoption("cpu_times")), "cpu-times")
    if config.getoption("side_by_side"):
        config.pluginmanager.register(SideBySide(config.getoption("side_by_side")), "side-by-side")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no tests of a GPU for `make test`."""
    return True if collection_path.name == "gpu" and "not gpu" in str(config.option.markexpr) else None


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Have torch use one thread when forks are to come, for what test files compute as they are imported."""
    if not session.config.getoption("side_by_side"):
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    server = ForkServer(Path())  # for all forks; it imports torch on the other CPU, while tests are collected
    server.begin()
    if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # all tests: some of them compile
        server.compiling.begin()
        server.bare.begin()
    session.config.stash[SERVER] = server
    session.config.add_cleanup(server.stop)
    yield
    if len(session.items) > MOST_WITHOUT_COMPILER:
        for name in COMPILER:
            importlib.import_module(name)
        for name in BY_AND_BY:
            with suppress(ImportError):
                importlib.import_module(name)
        what_all_ask_for()
    torch.set_num_threads(threads)


def what_all_ask_for() -> None:
    """Find out here what each fork would find out for itself: the hashes of Triton and of our kernels, 0.5 s."""
    from gemmtuned.kernels.triton.source import kernel_hashes

    kernel_hashes()
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what must run alone and what a test leaves to `make soak`, and give the long ones time, by hand, too."""
    leave_to_soak(items)
    config.stash[COUNTS] = counted(items)
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_S))
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)


def leave_to_soak(items: list[pytest.Item]) -> None:
    """Mark as soak, of each test marked `part`, all cases but so many, which are spread evenly over them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("part"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for all_of_it in cases.values():
        (count,) = all_of_it[0].get_closest_marker("part").args  # type: ignore[union-attr]
        last = len(all_of_it) - 1
        kept = {round(i * last / max(count - 1, 1)) for i in range(count)}
        for i, item in enumerate(all_of_it):
            if i not in kept:
                item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Let no garbage collection of a test walk through thousands of tests and all of torch, and few walk at all.

    They were a twentieth of the CPU time of all tests: what tests allocate lives as long as they do, and goes by its
    count of references.
    """
    gc.set_threshold(*GARBAGE)
    gc.enable()  # after conftest.py of the checkout
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def garbage_of_other_files_is_left() -> None:
    """Let no garbage collection of a test walk through what the files before it have imported and kept."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """Typer takes 5 ms to make a command of its function, at each call in this process."""
    plain, made = cli._make, {}

    def make(name: str, command: Any) -> Any:
        key = name, cli._from(command.file, command.name)  # a test may have put another function there
        if key not in made:
            made[key] = plain(name, command)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_make", make)
        yield


@pytest.fixture(autouse=True)
def our_loggers_stay() -> Iterator[None]:
    """What a test's program does to the loggers of this process is not the next one's."""
    logger = logging.getLogger("gemmtuned")
    before = (logger.level, logger.propagate, logger.disabled, list(logger.handlers))
    yield
    if logger.level != before[0]:  # to set it makes all loggers forget what they may skip
        logger.setLevel(before[0])
    logger.propagate, logger.disabled, logger.handlers[:] = before[1], before[2], before[3]


@pytest.fixture(scope="session")
def native_cache() -> Path:
    """A cache folder with the native hook in it: one of this checkout, with what the user's has been built there."""
    cache = Settings.from_env().cache
    users = find_built(USERS_CACHE)
    if users is not None and find_built(cache) is None:
        for file in users.parent.glob(f"{users.stem}.*"):
            (cache / file.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, cache / file.parent.name)
    build(cache)
    return cache


@pytest.fixture(autouse=True)
def has_its_own_home() -> Iterator[None]:
    """A test that writes where the user's home would be fails."""
    yield
    if NOBODYS.exists():
        found = sorted(str(path.relative_to(NOBODYS)) for path in NOBODYS.rglob("*") if path.is_file())
        shutil.rmtree(NOBODYS, ignore_errors=True)
        pytest.fail(f"it has no home of its own, and would have written to the user's: {', '.join(found)}")


@pytest.fixture(scope="session")
def built_for_tests() -> Path:
    """Where what tests alone need is built, kept by its hash: in the checkout, as the user's cache is the product's."""
    return KEPT


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    """Starts hooked programs without the two seconds that importing torch takes."""
    folder, shared = tmp_path_factory.mktemp("fork-server"), pytestconfig.stash.get(SERVER, None)
    server = ForkServer(folder) if shared is None else ForkServer(folder, of=shared, used=add)
    yield server
    server.stop()


@pytest.fixture
def forked_workers(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers that this process starts are forks of a process with torch, see forked_worker.py."""
    reads, used = os.pipe()

    def start(command: list[str], *, pass_fds: tuple[int], env: dict[str, str], **how: Any) -> subprocess.Popen[bytes]:
        orders = fork_server.running(env).fileno()
        program = [sys.executable, "-I", "-S", str(HERE / "forked_worker.py"), *map(str, (orders, *pass_fds, used))]
        return subprocess.Popen([*program, *command[4:]], pass_fds=(orders, *pass_fds, used), env=env, **how)

    monkeypatch.setattr(worker, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    yield
    os.close(used)
    with os.fdopen(reads) as file:
        fork_server.used(sum(map(float, file)))


@pytest.fixture
def beside_others(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches take times as they come, in programs that the test starts too: the machine may be in use."""
    folder = tmp_path_factory.mktemp("site")
    patch = "from gemmtuned.configs import cpu_wait\ncpu_wait.CpuWait.spent_s = lambda self: None\n"
    (folder / "sitecustomize.py").write_text(patch)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setattr(CpuWait, "spent_s", lambda self: None)


@pytest.fixture
def home(tmp_path: Path, native_cache: Path, fork_server: ForkServer) -> Iterator[Home]:
    """A home of its own for hooked programs; what those that were killed have left in /dev/shm goes."""
    home = Home(tmp_path / "home", native_cache, fork_server)
    yield home
    shutil.rmtree(pages_of(home.path / "probation"), ignore_errors=True)


@pytest.fixture(scope="module")
def kept_compiler_cache(built_for_tests: Path) -> Iterator[None]:
    """What Triton and NVRTC compile for a file of tests is not the user's, and is kept by the hash of its source."""
    folder = built_for_tests / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        patch.setenv("GEMMTUNED_CACHE", str(folder / "gemmtuned"))
        yield
