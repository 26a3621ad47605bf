"""What goes wrong in real programs: each case is served by torch, and doctor names it (docs/when-it-goes-wrong.md)."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hooked import LINEAR, Home, publish, published
from matrices import matrix

from gemmtuned.hooks.probation import DEATHS

# ---- a table that kills its process

DIES = """
    import os, signal, threading, torch
    from hooked import wait_for
    import gemmtuned
    wait_for(lambda: gemmtuned.generation() == 1)
    x, w = torch.ones(2048, 4096), torch.ones(4096, 4096)
    torch.set_num_threads(2)
    torch.mm(x, w.t())
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSEGV)).start()
    while True:
        torch.mm(x, w.t())
    """
LIVES = """
    import json, time, torch
    from hooked import publish, published, wait_for, LINEAR
    import gemmtuned
    from gemmtuned.hooks import activate
    hook = activate.current()
    wait_for(lambda: "generation 1 is not used" in gemmtuned.status()["note"])
    said = [gemmtuned.generation(), gemmtuned.reload()]
    hook.flusher.beat_soon()
    hook.flusher.flush()
    from doctored import doctor
    from pathlib import Path
    from hooked import Home
    said.append(doctor(Home(hook.settings.home, hook.settings.cache)))
    publish(hook.settings.config_dir, [published(LINEAR, "onednn")], 2)
    wait_for(lambda: gemmtuned.generation() == 2)
    said.append(gemmtuned.status()["note"])
    print(json.dumps(said))
    """


@pytest.mark.long
def test_after_two_deaths_the_next_start_runs_without_the_generation_and_with_the_one_after(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(replace(LINEAR, m=2048, n=4096, k=4096), "torch_swap")], 1)
    assert [home.run(DIES).code for _ in range(DEATHS)] == [-signal.SIGSEGV] * DEATHS
    done = home.run(LIVES)
    generation, reloaded, said, note = done.said

    assert (generation, reloaded) == (0, 0)
    assert said.startswith("WARN ") and "generation 1 is not used before" in said and "rm " in said
    assert note == ""
    assert len(done.ours) == 1


# ---- a route that fails, weights that change: quarantine itself is tested in test_hooks_dispatch.py

QUARANTINED = """
    import json, torch
    from hooked import wait_for, Home
    from doctored import doctor
    import gemmtuned
    from gemmtuned.hooks import activate
    hook = activate.current()
    wait_for(lambda: gemmtuned.generation() == 1)
    torch.mm(torch.ones(4, 16, dtype=torch.double), torch.ones(8, 16, dtype=torch.double).t())
    wait_for(lambda: gemmtuned.status()["errors"])
    hook.flusher.beat_soon()
    hook.flusher.flush()
    print(json.dumps(doctor(Home(hook.settings.home, hook.settings.cache))))
    """


def test_doctor_names_a_program_whose_route_failed(home: Home) -> None:
    fails = replace(LINEAR, dtype="fp64", wdtype="fp64", out_dtype="fp64")  # oneDNN has no fp64
    home.path.mkdir()
    publish(home.path / "configs", [published(fails, "onednn")], 1)

    assert "WARN test (pid" in (said := home.run(QUARANTINED).said)
    assert "1 errors" in said


FROZEN = """
    import json, time, torch
    from torch import nn
    from hooked import wait_for, Home
    from doctored import doctor
    import gemmtuned
    from gemmtuned.hooks import activate
    hook = activate.current()
    models = [nn.Sequential(nn.Linear(16, 8)).eval() for _ in range(4)]
    edited, freed, deleted, good = models
    for model in models:
        gemmtuned.freeze(model)
    x = torch.randn(4, 16)
    with torch.no_grad():
        edited[0].weight.mul_(2)
        freed[0].weight.data = torch.empty(0)
        del deleted[0].weight
        right = torch.equal(edited(x), nn.functional.linear(x, edited[0].weight, edited[0].bias))
        errors = []
        for model in (freed, deleted):
            try:
                model(x)
            except Exception as err:
                errors.append(type(err).__name__)
        good(x)
    wait_for(lambda: "3 frozen" in gemmtuned.status()["note"])  # our thread may have looked before the last was deleted
    hook.flusher.beat_soon()
    hook.flusher.flush()
    said = doctor(Home(hook.settings.home, hook.settings.cache))
    del edited, freed, deleted, models, model
    wait_for(lambda: not gemmtuned.status()["note"])
    print(json.dumps([right, errors, said]))
    """


def test_frozen_weights_that_were_edited_or_freed_are_served_plain_and_named(home: Home) -> None:
    right, errors, said = home.run(FROZEN).said

    assert right
    assert errors == ["RuntimeError", "AttributeError"]  # torch's own
    assert "WARN test (pid" in said and "3 frozen layers are served plain" in said


# ---- reload under load

LOAD = """
    import json, sys, threading, torch
    from hooked import publish, published, wait_for
    from ranks_program import ROUTER
    import gemmtuned
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    hook = activate.current()
    hook.flusher.stop()
    x, w = torch.randn(ROUTER.m, ROUTER.k), torch.randn(ROUTER.n, ROUTER.k)
    folder, bits = hook.settings.config_dir, []
    for generation, backend in enumerate(("torch_swap", "onednn"), 1):
        publish(folder, [published(ROUTER, backend)], generation)
        gemmtuned.reload()
        bits.append(torch.mm(x, w.t()))
    stop, seen = threading.Event(), []

    def work():
        torch.set_num_threads(1)
        mine = [0, 0, 0]
        while not stop.is_set():
            y = torch.mm(x, w.t())
            mine[0 if torch.equal(y, bits[0]) else 1 if torch.equal(y, bits[1]) else 2] += 1
        seen.append(mine)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    for generation in range(3, int(sys.argv[1]) + 3):
        publish(folder, [published(ROUTER, ("torch_swap", "onednn")[generation % 2])], generation)
        gemmtuned.reload()
    stop.set()
    [t.join() for t in threads]
    print(json.dumps([torch.equal(*bits), [sum(column) for column in zip(*seen)], hook.native.failures()]))
    """


@pytest.mark.parametrize("publishes", matrix([10, 100], [10]))
def test_every_call_under_many_publishes_is_wholly_of_one_table(home: Home, publishes: int) -> None:
    same, (first, second, neither), failures = home.run(LOAD, str(publishes), GEMMTUNED_RELOAD="manual").said

    assert not same  # the two kernels round differently, so a result tells which one made it
    assert neither == 0
    assert min(first, second) > 50
    assert failures == []
