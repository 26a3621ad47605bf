"""Foreign code with the hook off, counting, and routing all it can while tables arrive: the same outcome."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hook_matrix
import pytest
import torch
from foreign_programs import PROGRAMS, ROUGH
from hook_matrix import difference
from hooked import HERE, LINEAR, ForkServer, Home, publish, published

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]
RUN = f"import runpy; runpy.run_path({str(HERE / 'foreign_programs.py')!r}, run_name='__main__')"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: ForkServer) -> dict[str, Any]:
    """off and on -> what foreign_programs.py found there."""
    folder = tmp_path_factory.mktemp("foreign")
    home = Home(folder / "home", native_cache, fork_server)
    done = home.run(RUN, str(folder), AITER_TUNE_GEMM="0", timeout_s=360)
    assert done.code == 0 and (folder / "on").exists() and (folder / "off").exists(), done.err[-3000:]
    return {how: torch.load(folder / how, weights_only=False) for how in ("off", "on")}


def check(both: dict[str, Any], name: str, when: str, *, bits: bool) -> None:
    off, on = (both[how][when][name] for how in ("off", "on"))
    assert difference(off["value"], on["value"], bits=bits) == ""
    assert on["warnings"] == off["warnings"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_counted_it_is_what_it_is_without_the_hook_to_the_bit(both: dict[str, Any], name: str) -> None:
    check(both, name, "first", bits=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_routed_it_is_what_it_is_without_the_hook_up_to_rounding(
    both: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ROUGH:
        monkeypatch.setitem(hook_matrix.TOLERANCE, torch.float32, 5e-2)
        monkeypatch.setitem(hook_matrix.TOLERANCE, torch.float16, 5e-2)
    check(both, name, "second", bits=False)


def test_the_programs_went_through_routes_and_none_was_blamed(both: dict[str, Any]) -> None:
    found = both["on"]
    assert found["routes"] > 50
    assert found["served"] > found["counted"] // 2 > 200
    assert found["failed"] == {}


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_is_among_them() -> None:
    assert {"torchao_int8_weight_only", "torchao_int8_dynamic_activation"} <= PROGRAMS.keys()


# ---- gevent

GEVENT = """
    from gevent import monkey
    monkey.patch_all()
    import json, os, sys, threading, time
    import gevent, gevent.queue
    import torch, gemmtuned
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x, told, answers = torch.randn(4, 16), [], gevent.queue.Queue()

    def loops():
        there = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return len([fd for fd in there if os.path.exists(fd) and "eventpoll" in os.readlink(fd)])

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
