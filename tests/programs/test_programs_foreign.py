"""Foreign code with the hook off, counting, and routing all it can while tables arrive: the same outcome."""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_programs import DEAR, PROGRAMS
from foreign_running import K
from hooked import HERE, LINEAR, ForkServer, Home, publish, published, wait_for
from once import once
from torch.utils._pytree import keystr, tree_flatten_with_path

from gemmtuned.kernels.families.error import DEVIATIONS

RUN = f"import runpy; runpy.run_path({str(HERE / 'foreign_programs.py')!r}, run_name='__main__')"
DEPTH = 8  # products one after the other in the deepest programs: forward and backward of two layers, derived twice
LIMIT_S = 300  # of 20 on a machine of our own
pytestmark = pytest.mark.timeout(LIMIT_S + 60)
Found = Callable[[int], dict[str, Any]]
SOAK = 3  # turns: every route that takes a problem has had it


def tolerance(coarsest: torch.dtype) -> float:
    """How far two right evaluations of a program may be apart, as a share of the largest value of a result.

    One product of K terms is off by at most DEVIATIONS sqrt((K + 1) / 3) u of what its values are in RMS, whatever the
    order of the additions, and by u of the type that it is rounded to (the model is derived in
    kernels/families/error.py; Connolly, Higham and Mary 2021).  Two evaluations are apart by twice that.  The next
    product hands an error on as it hands on the values, so that the errors of products one after the other add up
    (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.5, to first order).
    """
    u_sum, u_out = torch.finfo(torch.float32).eps / 2, torch.finfo(coarsest).eps / 2
    return 2 * DEPTH * (DEVIATIONS * math.sqrt((K + 1) / 3) * u_sum + u_out)


def difference(off: Any, on: Any, share: float) -> str:
    """Where two outcomes differ, numbers by more than this share of the largest; empty where they do not."""
    theirs, ours = tree_flatten_with_path(off)[0], tree_flatten_with_path(on)[0]
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        return f"{len(ours)} results, not {len(theirs)}: {on!r}, not {off!r}"
    for (path, a), (_, b) in zip(theirs, ours, strict=True):
        where = f"result{keystr(path)}"
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b:
                return f"{where}: {b!r}, not {a!r}"
            continue
        stock, found = ((t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in (a, b))
        if stock != found:
            return f"{where}: {found}, not {stock}"
        limit = share * a.detach().double().abs().nan_to_num(posinf=0.0).max().item() if a.numel() else 0.0
        if not torch.allclose(a.double(), b.double(), rtol=0.0, atol=limit, equal_nan=True):
            return f"{where}: off by {(a.double() - b.double()).abs().max():g}, and {limit:g} is allowed"
    return ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: ForkServer) -> Found:
    """By the number of turns: off and on -> what foreign_programs.py found there, run once for all workers."""

    def programs(turns: int) -> dict[str, Any]:
        def make(folder: Path) -> None:
            home = Home(folder / "home", native_cache, fork_server.compiling)
            # The processors are others' too: a thread of OpenMP that has to wait must not spin on one of them
            env = {"AITER_TUNE_GEMM": "0", "OMP_WAIT_POLICY": "passive"}
            done = home.run(RUN, str(folder), str(turns), timeout_s=LIMIT_S, **env)
            assert done.code == 0 and (folder / "on").exists() and (folder / "off").exists(), done.err[-3000:]

        folder = once(tmp_path_factory, f"foreign-{turns}", make)
        return {how: torch.load(folder / how, weights_only=False) for how in ("off", "on")}

    return programs


@pytest.fixture(scope="module")
def counted(found: Found) -> dict[str, Any]:
    return found(0)


@pytest.fixture(scope="module")
def both(found: Found) -> dict[str, Any]:
    return found(1)


@pytest.fixture(scope="module")
def all_turns(found: Found) -> dict[str, Any]:
    return found(SOAK)


def check(both: dict[str, Any], name: str, off_when: str, on_when: str, share: float) -> None:
    off, on = both["off"][off_when][name], both["on"][on_when][name]
    assert difference(off["value"], on["value"], share) == ""
    assert on["warnings"] == off["warnings"]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in DEAR])
def test_counted_it_is_what_it_is_without_the_hook_to_the_bit(counted: dict[str, Any], name: str) -> None:
    check(counted, name, "first", "first", share=0.0)


@pytest.mark.long
@pytest.mark.parametrize("name", DEAR)
def test_counted_one_that_compiles_or_starts_interpreters_is_too(both: dict[str, Any], name: str) -> None:
    check(both, name, "first", "first", share=0.0)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_routed_it_is_what_it_is_without_the_hook_up_to_rounding(both: dict[str, Any], name: str) -> None:
    check(both, name, "second", "routed 0", tolerance(PROGRAMS[name].coarsest))


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(SOAK))
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_it_is_by_every_route(all_turns: dict[str, Any], name: str, turn: int) -> None:
    check(all_turns, name, "second", f"routed {turn}", tolerance(PROGRAMS[name].coarsest))


@pytest.mark.parametrize(
    "which",
    ["counted", pytest.param("both", marks=pytest.mark.long), pytest.param("all_turns", marks=pytest.mark.soak)],
)
def test_the_programs_went_through_right_routes_and_none_was_blamed(request: pytest.FixtureRequest, which: str) -> None:
    found = request.getfixturevalue(which)["on"]
    assert found["routes"] > 50
    assert found["products"] == found["routes"], "a product of the check was not served by its route"
    assert found["wrong"] == []
    assert found["served"] > found["counted"] // 2 > 200
    assert found["failed"] == {}


@pytest.mark.parametrize(
    ("off", "on", "word"),
    [
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.001]), "off by"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(2, 2), torch.ones(2, 2).t().contiguous().t(), "not"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]), "off by"),
        (["mm"], ["addmm"], "addmm"),
        ([1], [1, 2], "2 results"),
        ({"ends": [7, 7]}, {"ends": [-15, 7]}, "result['ends'][0]: -15, not 7"),
    ],
)
def test_a_difference_is_seen(off: Any, on: Any, word: str) -> None:
    assert difference(off, off, 0.0) == ""
    assert word in difference(off, on, tolerance(torch.float32))


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_is_among_them() -> None:
    assert sum(name.startswith("torchao") for name in PROGRAMS) == 2


@pytest.mark.parametrize("fresh", [False, True])
def test_a_program_whose_time_is_over_is_killed_with_its_children(home: Home, tmp_path: Path, fresh: bool) -> None:
    left = tmp_path / "child"
    code = """
        import os, sys, time
        if os.fork() == 0:
            with open(sys.argv[1], "w") as file:
                file.write(str(os.getpid()))
        time.sleep(600)
        """
    with suppress(subprocess.TimeoutExpired):  # where it is not the fork server that ends it
        assert home.run(code, str(left), fresh=fresh, timeout_s=1.0, AITER_TUNE_GEMM="0").code == -signal.SIGKILL
    wait_for(lambda: not lives(int(left.read_text())))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- gevent

GEVENT = """
    from gevent import monkey
    monkey.patch_all()
    import json, os, sys, threading, time
    import gevent, gevent.queue
    import torch, gemmtuned
    from hooked import opened
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x, told, answers = torch.randn(4, 16), [], gevent.queue.Queue()

    def loops():
        return sum("eventpoll" in link for link in opened().values())

    hubs = loops()

    def serve(name):
        for i in range(5):
            with torch.no_grad():
                y = model(x)
            told.append(f"{name} {i}")
            answers.put(round(y.double().sum().item(), 3))
            gevent.sleep(0.1)

    def look():
        return loops() - hubs

    servers = [gevent.spawn(serve, name) for name in "abc"]
    joined = threading.Thread(target=serve, args=("thread",))
    joined.start()
    for i in range(3):
        gevent.sleep(0.15)
        if gemmtuned.is_enabled():
            gemmtuned.reload()  # the same table again, while our thread may be at it
    joined.join()
    gevent.joinall(servers)
    names = [t.name for t in threading.enumerate()]
    state = gemmtuned.status()
    values = sorted(answers.get() for _ in range(20))
    print(json.dumps([told, values, names, look(), state["path"], state["generation"]]))
    """


@pytest.mark.long
@pytest.mark.skipif(find_spec("gevent") is None, reason="gevent is not installed")
def test_a_loop_of_gevent_is_the_programs_alone(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    off, on = (home.run(GEVENT, fresh=True, AITER_TUNE_GEMM=switch) for switch in ("0", "1"))

    assert on.said[:4] == off.said[:4]
    assert on.said[3] == 0, "a loop of gevent's was made in our thread"
    assert on.said[4:] == ["native", 1]
    assert on.err == off.err
    assert home.counts()["fp32:4x8x16,threads=2", "exact"] > 10
