"""In whatever state a program finds the native library, it does the same; one line more says what is off."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_library import DAMAGE
from hooked import LINEAR, Home, publish, published

from gemmtuned.hooks.native.build import build, library_path

pytestmark = pytest.mark.soak

PROGRAM = """
    import json, os, threading, torch, warnings
    import torch.nn.functional as F
    warnings.simplefilter("error")
    torch.manual_seed(0)
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    seen = []
    f = torch.compile(lambda x, w: F.linear(x, w).relu(), backend=lambda m, _: seen.append(m.code) or m.forward)
    y = [round(v, 4) for v in (f(x, w) + F.linear(x, w)).sum(0).tolist()]
    try:
        os.waitpid(-1, os.WNOHANG)
        children = True
    except ChildProcessError:
        children = False
    print(json.dumps([y, seen, children, [t.name for t in threading.enumerate()], F.linear is torch._C._nn.linear]))
    """


def read_only(library: Path) -> None:
    library.parent.chmod(0o555)
    library.parent.parent.chmod(0o555)


def without_a_compiler(library: Path) -> None:
    shutil.rmtree(library.parent.parent)


STATES: dict[str, tuple[Callable[[Path], object], bool]] = {  # what was done to the cache; whether the hook is on then
    "warm": (lambda library: None, True),
    "first start": (lambda library: shutil.rmtree(library.parent.parent), False),
    "no compiler": (without_a_compiler, False),
    "read-only cache": (read_only, True),
    "half copied": (lambda library: library.rename(library.with_name(library.name + ".part")), False),
    **{name: (damage, False) for name, damage in DAMAGE.items()},
}


@pytest.mark.parametrize("state", STATES)
def test_a_start_changes_nothing_but_one_line(home: Home, tmp_path: Path, state: str) -> None:
    cache = tmp_path / "cache"
    built, library = build(home.cache), library_path(cache)
    assert library is not None
    library.parent.mkdir(parents=True)
    for suffix in (".so", ".json"):
        shutil.copyfile(built.with_suffix(suffix), library.with_suffix(suffix))
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    damage, on = STATES[state]
    damage(library)
    env = {"PATH": str(tmp_path / "nothing")} if state == "no compiler" else {"PATH": os.environ["PATH"]}
    off = home.run(PROGRAM, AITER_TUNE_GEMM="0", GEMMTUNED_CACHE=str(cache), **env)
    done = home.run(PROGRAM, GEMMTUNED_CACHE=str(cache), **env)

    assert done.said == off.said
    assert len(done.ours) == (0 if on else 1), done.err
    assert [line for line in done.err.splitlines() if line not in done.ours] == off.err.splitlines()
