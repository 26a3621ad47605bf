"""Routes that are registered operators, whose package may take them back at any time: the program never notices."""

from __future__ import annotations

import pytest
from hooked import Home

PROGRAM = """
    import gc, json, threading, torch, gemmtuned
    from importlib.metadata import version
    from gemmtuned.configs.launch import OperatorLaunch
    from gemmtuned.configs.problem import Problem
    from hooked import publish, published, wait_for
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    writes = {writes}
    library, calls = torch.library.Library("planted", "DEF"), []
    library.define("mine(Tensor x, Tensor w" + (", Tensor(a!) y) -> ()" if writes else ") -> Tensor"))
    kernel = torch.library.Library("planted", "IMPL")

    def mine(x, w, y=None):
        calls.append(len(calls))
        if y is None:
            return x @ w.t()
        y.copy_(x @ w.t())

    kernel.impl("mine", mine, "CPU")
    problem = Problem.parse("fp32:4x8x16,threads=1")
    record = OperatorLaunch(
        operator="planted::mine", schema=str(torch.ops.planted.mine.default._schema),
        arguments=("x", "w", "y") if writes else ("x", "w"), package="torch", version=version("torch"),
    )
    row = published(problem, "planted", stamp=version("torch"), launch=record.text())
    publish(activate.current().settings.config_dir, [row], 1)
    wait_for(lambda: gemmtuned.generation() == 1)
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    right = (x.double() @ w.double().t()).float()

    def is_right():
        into = torch.mm(x, w.t(), out=torch.empty(4, 8))
        return all(torch.allclose(y, right, atol=1e-5) for y in (torch.mm(x, w.t()), into))

    said = [is_right()]
    served = len(calls)
    {end}
    said += [is_right() for _ in range(20)]
    print(json.dumps([all(said), served, len(calls) - served]))
"""
TAKEN_BACK = {
    "all of it": "library._destroy(); kernel._destroy(); gc.collect()",
    "its kernel alone": "kernel._destroy(); gc.collect()",
    "and another is in its place": """
    library._destroy(); kernel._destroy(); gc.collect()
    other = torch.library.Library("planted", "DEF")
    other.define("mine(Tensor x) -> Tensor")
    other.impl("mine", lambda x: x, "CPU")
    """,
}


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("what", TAKEN_BACK)
def test_an_operator_that_its_package_takes_back_is_called_no_more(home: Home, what: str, writes: bool) -> None:
    """Seen as a SIGSEGV, and with another one in its place as wrong results."""
    done = home.run(PROGRAM.replace("{writes}", str(writes)).replace("{end}", TAKEN_BACK[what].strip()))

    assert done.code == 0, done
    assert done.said == [True, 2, 0]


def test_an_operator_may_be_taken_back_while_threads_call(home: Home) -> None:
    end = """
    threads = [threading.Thread(target=lambda: said.extend(is_right() for _ in range(200))) for _ in range(3)]
    [t.start() for t in threads]
    library._destroy(); kernel._destroy(); gc.collect()
    [t.join() for t in threads]
    served = len(calls)
    """
    for _ in range(3):
        done = home.run(PROGRAM.replace("{writes}", "True").replace("{end}", end.strip()))
        assert done.code == 0 and done.said[0] is True and done.said[2] == 0, done


def test_an_operator_is_given_lists_of_integers(home: Home) -> None:
    """As one that Python registered declares them, and as C++ does."""
    code = """
    import json, torch, gemmtuned
    from importlib.metadata import version
    from gemmtuned.configs.launch import OperatorLaunch
    from gemmtuned.configs.problem import Problem
    from hooked import publish, published, wait_for
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    library, calls = torch.library.Library("planted", "DEF"), []
    library.define("listed(Tensor x, SymInt[] sizes, Tensor w, int[] none) -> Tensor")
    library.impl("listed", lambda x, sizes, w, none: calls.append([sizes, none]) or x @ w.t(), "CPU")
    problem = Problem.parse("fp32:4x8x16,threads=1")
    record = OperatorLaunch(
        operator="planted::listed", schema=str(torch.ops.planted.listed.default._schema),
        arguments=("x", (128, -1 << 63), "w", ()), package="torch", version=version("torch"),
    )
    row = published(problem, "planted", stamp=version("torch"), launch=record.text())
    publish(activate.current().settings.config_dir, [row], 1)
    wait_for(lambda: gemmtuned.generation() == 1)
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    y = torch.mm(x, w.t())
    print(json.dumps([y.unique().tolist(), calls]))
    """
    assert home.run(code).said == [[16.0], [[[128, -1 << 63], []]]]
