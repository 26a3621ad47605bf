"""A program that lives long: flushes, tables, forks and threads come and go, and what the process holds stays as it is.

72 hours of a server in short: a flush each 20 ms in place of each second, tables as fast as the watcher takes them,
children and threads that count all the while.
"""

from __future__ import annotations

import pytest
from hooked import Home

WARM_UP = 2 * 3 * 20 * 5  # calls
PROGRAM = """
    import gc, json, os, sys, threading, time, torch, gemmtuned
    from pathlib import Path
    from hooked import LINEAR, publish, published, wait_for
    from gemmtuned.configs.settings import Settings

    folder, rounds = Settings.from_env().config_dir, int(sys.argv[1])
    x, w = torch.ones(4, 16), torch.ones(8, 16)

    def descriptors():  # the fewest of some looks: a flush has the store open, again and again
        time.sleep(0.005)
        return len(os.listdir("/proc/self/fd"))

    def held():
        gc.collect()
        facts = Path("/proc/self/status").read_text()
        return [
            len(os.listdir("/proc/self/task")), min(descriptors() for _ in range(20)),
            int(facts.split("VmRSS:")[1].split()[0]), len(Path("/proc/self/maps").read_text().splitlines()),
        ]

    def work(m):
        for _ in range(5):
            torch.nn.functional.linear(x[: m % 4 + 1], w)

    def child():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(0)
                time.sleep(0.1)
                code = 0
            finally:
                gemmtuned.disable()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def take_up(generation, backend):
        publish(folder, [published(LINEAR, backend)], generation)
        return lambda: wait_for(lambda: gemmtuned.generation() == generation)

    def warm_up():  # libraries keep memory for each route, and for each thread that is in it at one moment
        barrier = threading.Barrier(3)

        def one():
            for _ in range(20):
                barrier.wait()
                work(3)

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for generation, backend in ((1, "torch_swap"), (2, "onednn")):
        take_up(generation, backend)()
        warm_up()
    seen = []
    for number in range(rounds):
        wait = take_up(3 + number, ("torch_swap", "onednn")[number // 4 % 2])
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        work(number)
        thread.join()
        child()
        wait()
        seen.append(held())
    status = gemmtuned.status()
    print(json.dumps([seen, status["errors"], status["reload_failures"], status["dropped"]]))
    """


def lives(home: Home, rounds: int, most_kib: int) -> None:
    home.path.mkdir()
    (home.path / "configs").mkdir(mode=0o755)
    done = home.run(PROGRAM, str(rounds), timeout_s=3000, GEMMTUNED_FLUSH_S="0.02", GEMMTUNED_QUIET="1")
    seen, *trouble = done.said
    late = seen[len(seen) // 2 :]
    threads, descriptors, kib, mappings = (
        [max(held[i] for held in half) for half in (seen[: len(seen) // 2], late)] for i in range(4)
    )

    assert trouble == [0, 0, 0]
    assert done.err == ""
    assert threads[1] <= threads[0]
    assert descriptors[1] <= descriptors[0]
    assert kib[1] - kib[0] <= most_kib
    assert mappings[1] <= mappings[0] + 4  # of malloc's
    assert home.calls() == rounds * 15 + WARM_UP


@pytest.mark.long
def test_what_a_process_holds_stays_as_it_is(home: Home) -> None:
    lives(home, 8, most_kib=1024)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_a_process_holds_stays_as_it_is_over_days(home: Home) -> None:
    lives(home, 600, most_kib=2048)
