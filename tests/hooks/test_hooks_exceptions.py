"""No C++ exception leaves the native hook: memory that runs out at every place in turn, in a reload and in a fork."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hooked import HERE, Home

from gemmtuned.hooks import native
from gemmtuned.hooks.native.build import compiler


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx = compiler()
    assert cxx is not None
    library = tmp_path_factory.mktemp("preload") / "failing_new.so"
    command = [cxx, "-std=c++20", "-O1", "-shared", "-fPIC", str(HERE / "failing_new.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


PROGRAM = """
    import ctypes, json, os, sys, torch
    from hooked import LINEAR
    from dataclasses import replace
    from gemmtuned.hooks import activate, native

    library = activate.current().native
    activate.current().background.end(5.0)  # no other thread of ours
    news = ctypes.CDLL(sys.argv[1])
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    right = torch.mm(x, w.t())
    """

LOADS = """
    def load(first, generation):
        rows = [native.Row(replace(LINEAR, m=4 + i), "exact", "eager", first + i, 1) for i in range(4)]
        library.load(rows, generation)

    load(100, 1)
    n, refused, wrong = 0, 0, []
    while True:
        n += 1
        news.news_arm(n, 0)
        try:
            load(1000 * n, 2)
            loaded = True
        except native.NativeError as err:
            loaded, refused = False, refused + ("bad_alloc" in str(err) or "memory" in str(err))
        seen = news.news_seen()
        news.news_arm(-1, 0)
        if loaded:
            break
        found = library.generation, library.find(LINEAR)
        if found != (1, ("exact", 100)) or not torch.equal(torch.mm(x, w.t()), right):
            wrong.append(n)
    news.news_arm(-1, 0)
    print(json.dumps([n - 1, refused, wrong, seen, library.generation, library.find(LINEAR)[1] == 1000 * n]))
    """


@pytest.mark.long
def test_a_reload_without_memory_leaves_the_table_of_before(home: Home, preload: Path) -> None:
    done = home.run(PROGRAM + LOADS, str(preload), fresh=True, LD_PRELOAD=str(preload))
    failed, refused, wrong, seen, generation, found = done.said

    assert failed > 8, "the table, its rows, four routes"
    assert (refused, wrong) == (failed, [])
    assert seen <= failed, "every place was tried"
    assert (generation, found) == (2, True)


FORKS = """
    said = []
    for first in range(1, 4):
        news.news_arm(first, 1)
        pid = os.fork()
        news.news_arm(-1, 0)
        if not pid:
            same = torch.equal(torch.mm(x, w.t()), right)
            counted = sum(s.calls for s in library.drain())
            os._exit(10 * counted + same)
        said.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(said))
    """


@pytest.mark.long
def test_a_fork_without_memory_ends_nobody_and_the_child_counts(home: Home, preload: Path) -> None:
    done = home.run(PROGRAM + FORKS, str(preload), fresh=True, LD_PRELOAD=str(preload))

    assert done.said == [11, 11, 11]


STANDS = """
    from gemmtuned.hooks.engine_operators import FORMS

    lib = torch.library.Library("mine", "FRAGMENT")

    def stand(name):
        return library.stand_before(f"mine::{name}", "", (-1, 0, 1, -1, -1, -1, -1), FORMS.index("opaque"))

    def counted(product):  # of one call, which is right
        assert torch.equal(product(x, w), x.relu() - w.relu().sum())
        return sum(s.calls for s in library.drain())

    n, failed, wrong = 0, 0, []
    while n == 0 or seen >= n:
        n += 1
        lib.define(f"product{n}(Tensor x, Tensor w) -> Tensor")
        lib.impl(f"product{n}", lambda x, w: x.relu() - w.relu().sum(), "CPU")
        product = getattr(torch.ops.mine, f"product{n}")
        tuple(library.drain())
        news.news_arm(n, 0)
        try:
            stands = bool(stand(f"product{n}"))
        except native.NativeError:
            stands, failed = False, failed + 1
        seen = news.news_seen()
        news.news_arm(-1, 0)
        found = counted(product), bool(stand(f"product{n}")), counted(product)
        if found != (int(stands), True, 1):
            wrong.append((n, stands, found))
    print(json.dumps([failed, wrong]))
    """


@pytest.mark.long
def test_an_operator_that_there_is_no_memory_to_stand_before_is_called_as_it_was_and_can_be_later(
    home: Home, preload: Path
) -> None:
    done = home.run(PROGRAM + STANDS, str(preload), fresh=True, LD_PRELOAD=str(preload))
    failed, wrong = done.said

    assert failed > 8, "its record, the library, what torch notes of both"
    assert wrong == []


def test_every_function_of_the_c_interface_promises_it() -> None:
    folder = Path(native.__file__).parent
    text = "".join(path.read_text() for path in (folder / "c_api.cpp", *sorted(folder.glob("*.h"))))
    functions = re.findall(r"^\w[\w:<>* ]* \*?(gt_\w+)\((?:[^()]|\n)*\)( noexcept)? \{", text, re.MULTILINE)

    assert {name for name, _ in functions} == {name for name, *_ in native.library.SIGNATURES}
    assert [name for name, promise in functions if not promise] == []
