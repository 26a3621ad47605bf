"""The long rows of docs/fault-matrix.md that no other file has: a million calls, hundreds of ends and swaps, a day."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import large_store
import pytest
from fakes import ENVIRONMENT
from forked import Forked, ForkServer
from hooked import Done, Home

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.db.store import Store

pytestmark = pytest.mark.soak

# ---- 1: 8 x 1,000,000 calls over 5,000 shapes

RANK = """
    import json, sys, time, torch
    torch.set_num_threads(1)
    calls = int(sys.argv[1])
    xs = [torch.ones(m, 4) for m in range(1, 101)]
    ws = [torch.ones(4, n) for n in range(1, 51)]
    pairs = [(x, w) for x in xs for w in ws]
    mm, out = torch.mm, {(x.shape[0], w.shape[1]): torch.empty(x.shape[0], w.shape[1]) for x, w in pairs}
    pairs = [(x, w, out[x.shape[0], w.shape[1]]) for x, w in pairs]
    began = time.monotonic()
    for _ in range(calls // len(pairs)):
        for x, w, y in pairs:
            mm(x, w, out=y)
    took = time.monotonic() - began
    from gemmtuned.hooks import activate
    flusher, end = activate.current().flusher, time.monotonic() + 300
    flusher.flush()  # 5,000 rows beside seven others: longer than the half second that a program's end may take
    while flusher._pending and time.monotonic() < end:
        time.sleep(0.2)
        flusher.flush()
    print(json.dumps(took))
    """


@pytest.mark.parametrize("calls", [int(os.environ.get("CALLS", "1000000"))])
def test_eight_processes_that_call_a_million_times_each_are_counted_exactly(home: Home, calls: int) -> None:
    began_s = time.monotonic()
    ranks = home.run_ranks(8, RANK, str(calls), timeout_s=1200, GEMMTUNED_FLUSH_S="1")
    print(f"took {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    assert [rank.code for rank in ranks] == [0] * 8, [rank.err for rank in ranks]
    told = [line for rank in ranks for line in rank.ours]  # one that waits for the others says so, and loses nothing
    assert all("counts stay in memory" in line for line in told), told
    counts = home.counts()
    assert sum(counts.values()) == 8 * calls
    assert len(counts) == 5000 and set(counts.values()) == {8 * calls // 5000}


# ---- 9: a reader that stays for ten minutes under load

LOADED = """
    import sys, time, torch
    torch.set_num_threads(1)
    xs = [torch.ones(m, 4) for m in range(1, 51)]
    ws = [torch.ones(4, n) for n in range(1, 41)]
    end, steps = time.monotonic() + float(sys.argv[1]), 0
    while time.monotonic() < end:
        [torch.mm(x, w) for x in xs for w in ws]
        steps += 1
        time.sleep(0.2)
    print(2000 * steps)
    """


def test_a_reader_that_stays_under_load(home: Home) -> None:
    """Four programs write 2,000 shapes a second each beside it: the log has a bound, and no count is lost."""
    span_s = float(os.environ.get("READER_S", "600"))
    home.run("import torch; torch.mm(torch.ones(4, 4), torch.ones(4, 4))")
    log, longest = home.path / "tune.db-wal", 0
    with closing(sqlite3.connect(home.path / "tune.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sighting").fetchall()
        done: list[list[Done]] = []
        work = threading.Thread(
            target=lambda: done.append(home.run_ranks(4, LOADED, str(span_s), timeout_s=span_s + 120))
        )
        work.start()
        while work.is_alive():
            longest = max(longest, log.stat().st_size if log.exists() else 0)
            work.join(0.5)
    (ranks,) = done
    print(f"{span_s:g} s, the longest log {longest >> 20} MiB", file=sys.stderr)
    assert [rank.code for rank in ranks] == [0] * 4, [rank.err for rank in ranks]
    assert home.calls() == 1 + sum(int(rank.out) for rank in ranks)
    assert longest < 80 << 20
    home.run("import torch; torch.mm(torch.ones(4, 4), torch.ones(4, 4))")
    assert (log.stat().st_size if log.exists() else 0) < 8 << 20


# ---- 13: 500 ends of programs

ENDS: dict[str, tuple[str, int, str]] = {  # what the program does last, its exit code, the last word of its stderr
    "its last line": ("", 0, ""),
    "sys.exit": ("sys.exit(5)", 5, ""),
    "sys.exit in a thread": ("t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0, ""),
    "an exception": ("raise ValueError('theirs')", 1, "ValueError: theirs"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),  # as python -c ends by it
    "atexit": ("atexit.register(sys.stdout.flush)", 0, ""),
    "a thread that runs on": ("threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", 0, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM, ""),
    "os._exit": ("os._exit(7)", 7, ""),
}
UNCOUNTED = ("SIGTERM", "os._exit")  # gone without a last flush: what the last interval counted is lost

END = """
import atexit, os, signal, sys, threading, time, torch
for _ in range({calls}):
    torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
print(time.monotonic(), open("/proc/self/schedstat").read(), flush=True)
{last}
"""


def end_s(program: Forked) -> tuple[float, float, str]:
    """(seconds from the program's word to its end, the same without those in which others had the CPU, its stderr)."""
    out, err = program.communicate(timeout=60)
    began_s, _, delayed_before_ns, _ = out.split()
    took_s = program.ended_s - float(began_s)  # one clock for all processes of a machine
    return took_s, took_s - (program.delayed_s - int(delayed_before_ns) / 1e9), err


def start(home: Home, code: str, **env: str) -> Forked:
    program = home.start(code, whole_end=True, **env)
    assert isinstance(program, Forked)
    return program


def test_five_hundred_ends_of_programs(home: Home) -> None:
    """Each takes half a second longer than without us at most, says nothing, and what it counted is there."""
    seed, expected, slow, took = 13, 0, [], []
    dice = random.Random(seed)
    unhooked = [start(home, END.format(calls=5, last=""), AITER_TUNE_GEMM="0") for _ in range(3)]
    unhooked_s = max(end_s(process)[1] for process in unhooked)
    for number in range(int(os.environ.get("ENDS", "60"))):
        how = dice.choice(list(ENDS))
        last, code, word = ENDS[how]
        calls = dice.randrange(1, 30)
        process = start(home, END.format(calls=calls, last=last), GEMMTUNED_FLUSH_S="60")
        wall_s, ours_s, err = end_s(process)
        expected += 0 if how in UNCOUNTED else calls
        where = f"seed={seed} end={number} {how}: {err}"
        assert process.returncode == code, where
        assert (err.splitlines() or [""])[-1] == word and "gemmtuned" not in err, where
        took.append((round(ours_s, 2), round(wall_s, 2), how))
        if ours_s > unhooked_s + 0.5:
            slow.append(took[-1])
    assert home.calls() == expected
    took.sort()
    print(
        f"without us {unhooked_s:.2f}; {len(took)} ends, median {took[len(took) // 2]}, longest {took[-3:]}",
        file=sys.stderr,
    )
    assert slow == []


# ---- 14: a minute of a hundred publishes a second

MINUTE = """
    import json, sys, threading, time, torch
    from hooked import publish, published, wait_for
    from ranks_program import ROUTER
    import gemmtuned
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    hook = activate.current()
    x, w = torch.randn(ROUTER.m, ROUTER.k), torch.randn(ROUTER.n, ROUTER.k)
    folder, bits, rows = hook.settings.config_dir, [], []
    for generation, backend in enumerate(("torch_swap", "onednn"), 1):
        rows.append([published(ROUTER, backend)])
        publish(folder, rows[-1], generation)
        wait_for(lambda: gemmtuned.generation() == generation)
        bits.append(torch.mm(x, w.t()))
    stop, seen, spans = threading.Event(), [], []

    def work():
        torch.set_num_threads(1)
        mine = [0, 0, 0]
        while not stop.is_set():
            y = torch.mm(x, w.t())
            mine[0 if torch.equal(y, bits[0]) else 1 if torch.equal(y, bits[1]) else 2] += 1
        seen.append(mine)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    end, published_n = time.monotonic() + float(sys.argv[1]), 2
    next_s = time.monotonic()
    while time.monotonic() < end:
        published_n += 1
        publish(folder, rows[published_n % 2], published_n)
        next_s = max(next_s + 0.01, time.monotonic() - 0.1)
        time.sleep(max(next_s - time.monotonic(), 0))
    done_s = time.monotonic()
    wait_for(lambda: gemmtuned.generation() == published_n)
    last_s = time.monotonic() - done_s
    stop.set()
    [t.join() for t in threads]
    status = gemmtuned.status()
    print(json.dumps([
        torch.equal(*bits), [sum(column) for column in zip(*seen)], published_n, last_s, status["reload_failures"],
        status["errors"],
    ]))
    """


def test_a_minute_of_publishes_under_eight_threads(home: Home) -> None:
    same, (first, second, neither), count, last_s, failures, errors = home.run(
        MINUTE, os.environ.get("MINUTE_S", "60"), timeout_s=300
    ).said
    print(f"{count} publishes, {first} and {second} calls, the last in use after {last_s:.2f} s", file=sys.stderr)
    assert not same and neither == 0 and min(first, second) > 1000
    assert count > 5 * float(os.environ.get("MINUTE_S", "60")) and failures == errors == 0


# ---- 10: the database locked by another process for a minute

LOCKED = """
    import json, os, sqlite3, sys, threading, time, torch
    from gemmtuned.hooks import activate

    locked_s, x, w = float(sys.argv[1]), torch.ones(4, 16), torch.ones(8, 16)
    flusher = activate.current().flusher

    def called_for(seconds):
        took, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            torch.nn.functional.linear(x, w)
            took.append(time.perf_counter() - began)
            time.sleep(0.0005)
        return took

    free = called_for(3)  # the database is there by now
    other = sqlite3.connect(os.path.join(os.environ["GEMMTUNED_HOME"], "tune.db"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    held = called_for(locked_s)
    more = threading.active_count() - threads[0], len(os.listdir("/proc/self/task")) - threads[1]
    complaint = flusher.complaint
    other.execute("ROLLBACK")
    other.close()
    after = called_for(3)
    median = lambda of: sorted(of)[len(of) // 2]
    print(json.dumps([len(free) + len(held) + len(after), median(free), median(held), more, complaint]))
    """


def test_a_database_that_is_locked_for_a_minute_holds_no_call_up(home: Home) -> None:
    done = home.run(LOCKED, os.environ.get("LOCKED_S", "60"), timeout_s=200, fresh=True, GEMMTUNED_FLUSH_S="1")
    calls, free_s, held_s, more, complaint = done.said
    print(f"a call took {free_s * 1e6:.1f} us before and {held_s * 1e6:.1f} us meanwhile", file=sys.stderr)
    assert more == [0, 0] and "locked" in complaint
    assert held_s < 1.5 * free_s + 2e-6
    with closing(sqlite3.connect(home.path / "tune.db")) as conn:
        assert conn.execute("SELECT sum(calls) FROM sighting").fetchone() == (calls,)


# ---- 16: the folder of the tables swapped a hundred times, as a ConfigMap is, removed, renamed

SWAPS = """
    import json, os, shutil, sys, threading, time, torch
    from pathlib import Path
    from hooked import LINEAR, publish, published, wait_for
    from gemmtuned.configs.settings import Settings
    import gemmtuned

    folder = Settings.from_env().config_dir
    shutil.rmtree(folder, ignore_errors=True)
    rows = [[published(LINEAR, backend)] for backend in ("torch_swap", "onednn")]
    stop, x, w = threading.Event(), torch.ones(4, 16), torch.ones(8, 16)

    def work():
        while not stop.is_set():
            assert torch.nn.functional.linear(x, w)[0, 0] == 16

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def versioned(generation):  # as Kubernetes does: a link to a folder that is never changed, and the link renamed
        new = folder.parent / f"..{generation}"
        publish(new, rows[generation % 2], generation)
        link = folder.parent / "link"
        link.symlink_to(new.name)
        if not folder.is_symlink() and folder.exists():
            shutil.rmtree(folder)
        link.replace(folder)

    def anew(generation):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o755, parents=True)
        publish(folder, rows[generation % 2], generation)

    def renamed(generation):
        new = folder.parent / "new"
        publish(new, rows[generation % 2], generation)
        if folder.exists():
            folder.rename(folder.parent / f"old-{generation}")
        new.rename(folder)

    held, slow = [], []
    for generation in range(1, 101):
        (versioned, anew, renamed)[generation * 7 % 3](generation)
        began = time.monotonic()
        wait_for(lambda: gemmtuned.generation() == generation, limit_s=10)
        slow.append(time.monotonic() - began)
        held.append([len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))])
    stop.set()
    thread.join()
    print(json.dumps([max(slow), held[5:], gemmtuned.status()["errors"]]))
    """


def test_a_hundred_swaps_of_the_folder_under_load(home: Home) -> None:
    slowest_s, held, errors = home.run(SWAPS, timeout_s=600, fresh=True).said
    print(f"the slowest was in use after {slowest_s:.2f} s", file=sys.stderr)
    tasks, descriptors = zip(*held, strict=True)
    assert max(tasks) - min(tasks) <= 1
    assert min(descriptors[-20:]) <= min(descriptors[:20])  # between two flushes, which open the database
    assert errors == 0


# ---- 35: a day of churn: programs come and go beside one daemon

CHURN = """
import sys, torch
for m in {sizes}:
    for _ in range({calls}):
        torch.mm(torch.ones(m, 64), torch.ones(64, {n}))
"""


A_ROW_KIB = 4  # what a publish holds of each row of its table while it writes it, in a thread


@contextmanager
def daemon(home: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).parents[1] / "support/daemon_process.py"), str(home)]
    with (home / "log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def of_process(pid: int) -> tuple[int, int, int]:
    """(resident KiB, threads, descriptors)."""
    facts = Path(f"/proc/{pid}/status").read_text()
    number: Callable[[str], int] = lambda name: int(facts.split(f"{name}:")[1].split()[0])  # noqa: E731
    return number("VmRSS"), number("Threads"), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("solved", [0, 7000, large_store.PROBLEMS])
def test_a_day_of_churn(tmp_path: Path, native_cache: Path, fork_server: ForkServer, solved: int) -> None:
    """As many programs as start in a day where one starts every two and a half minutes, one after another.

    solved: solutions of the store that they find; the daemon tunes the rest of its problems meanwhile.
    """
    programs, seed = int(os.environ.get("CHURN", "600")), 35
    dice = random.Random(seed)
    home = Home(tmp_path / "home", native_cache, fork_server)
    home.path.mkdir()
    if solved:
        with closing(Store(home.path / "tune.db", locks=home.path / "locks")) as store:
            large_store.fill(store, ENVIRONMENT, solved=solved, backend="fast", now_s=time.time())
    held, rows, logs, expected = [], [], [], sum(home.counts().values()) if solved else 0
    with daemon(home.path) as process:
        for number in range(programs):
            sizes, n = dice.sample(range(1, 65), 3), 64 * dice.randrange(1, 9)
            code = CHURN.format(sizes=sizes, calls=5, n=n)
            done = home.run(code, GEMMTUNED_RUN=f"job-{number}", GEMMTUNED_QUIET="0")
            assert done.code == 0 and "Traceback" not in done.err, f"seed={seed} program={number}: {done.err}"
            expected += 15
            held.append(of_process(process.pid))
            rows.append(
                sum(file.rows for file in found.files) if (found := read_manifest(home.path / "configs")) else 0
            )
            logs.append(sum(path.stat().st_size for path in home.path.glob("tune.db-wal")))
        assert process.poll() is None, (home.path / "log").read_text()[-2000:]
        process.terminate()
        assert process.wait(20) == 143
    assert home.calls() == expected
    half = len(held) // 2
    memory, threads, descriptors = zip(*held, strict=True)
    resting = [size if count == min(threads) else 0 for size, count, _ in held]  # no thread publishes
    grew = max(resting[half:]) - max(resting[half // 2 : half])
    print(
        f"{programs} programs beside {solved} solutions: daemon {max(resting[half:])} KiB, grew {grew} KiB in the "
        f"second half while the table grew by {rows[-1] - rows[half]} rows, {max(memory)} KiB while it published, "
        f"threads {max(threads)}, descriptors {max(descriptors)}, log {max(logs)} bytes",
        file=sys.stderr,
    )
    assert min(max(resting[half:]), max(resting[half // 2 : half])) > 0, "it published without a rest"
    assert grew < 4096 + A_ROW_KIB * (rows[-1] - rows[half]) and max(logs) <= 8 << 20
    assert max(memory) - max(resting) < 4096 + A_ROW_KIB * rows[-1]
    assert max(threads[half:]) <= max(threads[:half]) and max(descriptors[half:]) <= max(descriptors[:half]) + 2
    with closing(sqlite3.connect(home.path / "tune.db")) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert conn.execute("SELECT count(*) FROM session WHERE ended_us IS NULL").fetchone() == (0,)
    assert json.loads((home.path / "daemon.json").read_text())["state"] == "stopped"
    if solved:
        manifest = read_manifest(home.path / "configs")
        assert manifest is not None and sum(file.rows for file in manifest.files) >= solved
