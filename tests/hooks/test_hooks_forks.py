"""Forks that find nothing of ours at work: the child writes to none of our memory until it makes use of us."""

import pytest
from hooked import Home

IDLE = """
    import json, os, resource, statistics, sys, time, torch, gemmtuned
    from hooked import wait_for
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))

    def at_rest():
        hook = gemmtuned.hooks.activate.current()
        return hook.flusher.calls and not hook.flusher._pending and not hook.background._awake.is_taken

    def forked(child):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = child() or 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
FAULTS = """
    import gc

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        childs = os.wait4(pid, 0)[2].ru_minflt
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, childs

    gc.collect()
    told = [faults() for _ in range(31)]
    print(json.dumps([statistics.median(one) for one in zip(*told)]))
"""
MOST_PARENT, MOST_CHILD = 110, 70  # pages: 68 and 32 were seen; 170 and 300 while Python did something at each fork


def test_a_fork_copies_few_pages_for_us(home: Home) -> None:
    waits = "    wait_for(at_rest)\n"
    on = home.run(IDLE + waits + FAULTS).said
    off = home.run(IDLE + FAULTS, GEMMTUNED="0").said
    assert on[0] - off[0] <= MOST_PARENT
    assert on[1] - off[1] <= MOST_CHILD


def test_a_fork_that_had_to_wait_makes_none_of_the_next_ones_slow(home: Home) -> None:
    """What was paused for it stayed paused in our books until our thread came by, a second later."""
    done = home.run(
        IDLE
        + """
    import threading
    from gemmtuned.hooks import activate, forks, imports
    activate.current().flusher.flush()
    wait_for(lambda: at_rest() and activate.current().background._sleeper.sleeps_in)
    paused, usual = [], forks.begin
    forks.begin = lambda fork: (paused.append(fork), usual(fork))
    entered, leaves = threading.Event(), threading.Event()

    def imports_something():
        with imports.importing():
            entered.set()
            leaves.wait()

    other = threading.Thread(target=imports_something)
    other.start(), entered.wait()
    threading.Timer(0.1, leaves.set).start()
    forked(int), other.join()
    waited = len(paused)
    tried = 0
    while tried < 40 and (tried == 0 or len(paused) > waited):  # our thread may be in the middle of a turn
        waited = len(paused)
        forked(int)
        tried += 1
    print(json.dumps([len(paused) > 0, tried < 40]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [True, True], done.err


def test_a_child_runs_none_of_our_python_and_has_no_descriptor_of_ours(home: Home) -> None:
    (home.path / "configs").mkdir(parents=True)
    done = home.run(
        IDLE
        + """
    from gemmtuned.hooks import activate
    wait_for(lambda: at_rest() and activate.current().watcher.events._informed)

    def inotify():
        return sum("inotify" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                   if os.path.lexists(f"/proc/self/fd/{fd}"))

    def child():
        return min(len(seen), 9) * 10 + inotify()

    seen = []
    def trace(frame, event, argument):
        if frame.f_globals["__name__"].startswith("gemmtuned.hooks") and os.getpid() != parent:
            if frame.f_code.co_name != "_after_fork_in_child":
                seen.append(frame.f_code.co_name)
    parent = os.getpid()
    sys.setprofile(trace)
    codes = [forked(child) for _ in range(9)]
    sys.setprofile(None)
    print(json.dumps([inotify(), min(codes)]))
    """
    )
    assert done.said == [1, 0], done.err


def test_a_child_closes_no_descriptor_of_the_programs_under_our_number(home: Home) -> None:
    (home.path / "configs").mkdir(parents=True)
    done = home.run(
        IDLE
        + """
    from gemmtuned.hooks import activate
    wait_for(lambda: at_rest() and activate.current().watcher.events._informed)
    fd = activate.current().watcher.events.descriptor()
    read, write = os.pipe()
    os.dup2(read, fd)
    os.write(write, b"x")
    print(json.dumps([forked(lambda: os.fstat(fd).st_ino != os.fstat(read).st_ino) for _ in range(5)]))
    """
    )
    assert done.said == [0] * 5, done.err


@pytest.mark.parametrize(
    ("use", "is_right"),
    [
        ("gemmtuned.status()", "found['pid'] == os.getpid() and found['calls'] == 0"),
        ("gemmtuned.is_enabled()", "found"),
        ("gemmtuned.phase('warm-up').__enter__()", "gemmtuned.hooks.phase.current() == 'warm-up'"),
        ("gemmtuned.set_phase('late')", "gemmtuned.hooks.phase.current() == 'late'"),
        ("gemmtuned.disable()", "not gemmtuned.is_enabled()"),
        ("gemmtuned.enable()", "gemmtuned.status()['pid'] == os.getpid()"),
        ("gemmtuned.ready(0.1)", "found"),
        ("gemmtuned.reload()", "found == 0"),
    ],
)
def test_whatever_a_child_asks_first_it_is_told_of_itself(home: Home, use: str, is_right: str) -> None:
    done = home.run(
        IDLE
        + f"""
    def child():
        found = {use}
        assert {is_right}, found
        assert gemmtuned.hooks.activate._process == gemmtuned.configs.processes.own_process()
    wait_for(at_rest)
    outer = gemmtuned.phase("of the parent")
    with outer:
        codes = [forked(child) for _ in range(3)]
    print(json.dumps(codes))
    """
    )
    assert done.said == [0, 0, 0], done.err
    assert home.calls() == 1


def test_children_that_count_are_counted_from_nothing_whoever_their_parent_is(home: Home) -> None:
    """Children of a child that has counted nothing, and of one that has; by multiprocessing, too."""
    done = home.run(
        IDLE
        + """
    import multiprocessing
    wait_for(at_rest)

    def counts(times=1):
        for _ in range(times):
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))

    def ends():
        counts(3)
        gemmtuned.hooks.activate._last_flush()

    def idle_child():
        return forked(ends)

    def busy_child():
        ends()
        return forked(ends)

    codes = [forked(idle_child), forked(busy_child)]
    context = multiprocessing.get_context("fork")
    for target in (counts, time.monotonic):
        worker = context.Process(target=target)
        worker.start(), worker.join()
        codes.append(worker.exitcode)
    print(json.dumps(codes))
    """
    )
    assert done.said == [0, 0, 0, 0], done.err
    assert home.calls() == 1 + 3 + 6 + 1


def test_a_fork_that_never_comes_leaves_our_thread_to_go_on(home: Home) -> None:
    """forkpty fails where there is no terminal to be had: Python has called the hooks before it, and libc none."""
    done = home.run(
        IDLE
        + """
    from gemmtuned.hooks.native import our_thread
    wait_for(at_rest)
    for lib in our_thread._knows_of_forks:
        lib.gt_before_python_fork()
        assert lib.gt_is_held()
        lib.gt_after_python_fork()
        assert not lib.gt_is_held()
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    wait_for(lambda: gemmtuned.status()["calls"] == 2)
    print(json.dumps(2))
    """
    )
    assert done.said == 2, done.err
