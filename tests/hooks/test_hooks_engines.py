"""Our plugin in a serving engine: it labels, tells warm-ups apart, and never gets in the way of another version."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hooked import Home, publish, published

from gemmtuned.configs.problem import Problem
from gemmtuned.db import queries
from gemmtuned.db.phases import phases

START = """
import json, logging, sys
import vllm_stand_in as stand_in
made = stand_in.take_place()  # as vLLM is, before torch
import torch
log = logging.getLogger("vllm")
lines = []
class Lines(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
log.addHandler(Lines()); log.setLevel(logging.INFO); log.propagate = False
import gemmtuned, gemmtuned._engines
x, w = torch.randn(4, 16), torch.randn(16, 8)
torch.set_num_threads(2)
"""
WORKER = (
    START
    + """
gemmtuned._engines.vllm()
gemmtuned._engines.vllm()
worker = stand_in.Worker(lambda: x @ w)
wrapper = made["vllm.v1.worker.worker_base"].WorkerWrapperBase(worker, stand_in.config())
wrapper.init_device()
found = [gemmtuned.generation(), wrapper.determine_available_memory(), wrapper.compile_or_warm_up_model()]
for step in range(5):
    assert wrapper.execute_model(step) == step
gemmtuned.disable()
print(json.dumps({"lines": lines, "found": found, "called": worker.called}))
"""
)


def test_both_engines_find_the_plugin_by_its_entry_point() -> None:
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        found = [entry for entry in entry_points(group=group) if entry.name == "gemmtuned"]
        assert found
        assert found[0].value == f"gemmtuned._engines:{name}"
        assert callable(found[0].load())


def test_a_worker_is_labelled_has_its_table_first_and_leaves_its_warm_up_out(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(Problem(m=4, n=8, k=16, dtype="fp32", threads=2), "torch_swap")], 1)
    done = home.bare().run(WORKER, GEMMTUNED_RUN="", GEMMTUNED_QUIET="0")
    said = done.said

    assert "generation" not in done.err  # our line stands in the engine's log alone
    assert said["found"] == [1, 1 << 30, "times"]
    assert said["called"] == ["init_device"]
    (line,) = said["lines"]  # of two loads of the plugin
    assert "counting as vllm:tiny (worker rank 0), generation 1, 1 rows" in line
    database = home.path / "tune.db"
    assert {row["phase"]: row["calls"] for row in phases(database)} == {"profile": 1, "warm-up": 1}
    assert [(row["run"], row["calls"]) for row in queries.coverage(database, by="run")] == [("vllm:tiny", 5)]
    assert [(row["run"], row["role"]) for row in queries.sessions(database)] == [("vllm:tiny", "worker rank 0")]


def test_a_label_of_the_users_own_stays(home: Home) -> None:
    assert home.run(WORKER, GEMMTUNED_RUN="mine").said
    assert {row["run"] for row in queries.sessions(home.path / "tune.db")} == {"mine"}


def test_quiet_is_quiet_in_the_engines_log_too(home: Home) -> None:
    done = home.run(WORKER, GEMMTUNED_RUN="", GEMMTUNED_QUIET="1")

    assert done.said["lines"] == []
    assert "generation" not in done.err


ROLES = (
    START
    + """
gemmtuned._engines.vllm()
config = made["vllm.config"].VllmConfig()
if sys.argv[1] == "engine":
    engine = made["vllm.v1.engine.core"].EngineCore(config)
    made["vllm.config"].VllmConfig()
    assert engine.caches is config
print(json.dumps({"lines": lines, "status": gemmtuned.status()}))
"""
)


@pytest.mark.parametrize("role", ["server", "engine"])
def test_the_processes_beside_the_worker_know_what_they_are(home: Home, role: str) -> None:
    said = home.run(ROLES, role, GEMMTUNED_RUN="", GEMMTUNED_QUIET="").said

    assert (said["status"]["run"], said["status"]["role"]) == ("vllm:tiny", role)
    assert said["lines"]
    assert f"({role})" in said["lines"][-1]


STRANGE = (
    START
    + """
base, config, core = (made[name] for name in ("vllm.v1.worker.worker_base", "vllm.config", "vllm.v1.engine.core"))
if sys.argv[1] == "nothing there":
    del base.WorkerWrapperBase, config.VllmConfig, core.EngineCore
if sys.argv[1] == "no methods":
    for name in ("determine_available_memory", "compile_or_warm_up_model", "execute_model"):
        delattr(stand_in.Worker, name)
if sys.argv[1] == "no facts":
    stand_in.config = lambda: None
gemmtuned._engines.vllm()
if sys.argv[1] != "nothing there":
    worker = stand_in.Worker(lambda: x @ w)
    base.WorkerWrapperBase(worker, stand_in.config()).init_device()
    assert worker.called == ["init_device"]
x @ w
print(json.dumps(gemmtuned.is_enabled()))
"""
)


@pytest.mark.parametrize("what", ["nothing there", "no methods", "no facts"])
def test_another_version_of_the_engine_runs_as_without_the_plugin(home: Home, what: str) -> None:
    assert home.run(STRANGE, what, GEMMTUNED_RUN="").said is True


def test_what_an_engine_raises_is_what_it_raises(home: Home) -> None:
    program = WORKER.replace("x @ w)", "1 / 0)").replace(
        "found =", "import traceback\ntry:\n    wrapper.determine_available_memory()\nexcept ZeroDivisionError:\n"
        "    print(json.dumps(gemmtuned.hooks.phase.current())); sys.exit()\nfound ="
    )  # fmt: skip
    assert home.run(program).said == ""


def test_switched_off_the_plugin_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, gemmtuned._engines as e; e.vllm(); e.sglang(); print([m for m in sys.modules if 'hooks' in m])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=tmp_path)

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


RANKS = """
import json, os, time, torch, torch.distributed as dist
import vllm_stand_in as stand_in
from types import ModuleType, SimpleNamespace
from hooked import publish, published
made = stand_in.take_place()
import sys, gemmtuned, gemmtuned._engines
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks import activate
from gemmtuned.hooks.engines import member
member.EVERY = 2
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=2)
state = ModuleType("vllm.distributed.parallel_state")
state.get_tp_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
sys.modules["vllm.distributed"], sys.modules[state.__name__] = ModuleType("vllm.distributed"), state
gemmtuned._engines.vllm()
x, w = torch.randn(4, 16), torch.randn(16, 8)
worker = stand_in.Worker(lambda: x @ w)
wrapper = made["vllm.v1.worker.worker_base"].WorkerWrapperBase(worker, stand_in.config(split=2, rank=rank))
wrapper.init_device()
seen = [gemmtuned.generation()]
wrapper.determine_available_memory()
problem = Problem(m=4, n=8, k=16, dtype="fp32", threads=2)
for step in range(20):
    if step in (3, 4, 11) and rank == step % 2:
        publish(activate.current().settings.config_dir, [published(problem, "torch_swap")], 2 + step)
    wrapper.execute_model(step)
    seen.append(gemmtuned.generation())
print(json.dumps({"seen": seen, "run": gemmtuned.status()["run"]}))
dist.destroy_process_group()
"""


def test_ranks_of_one_model_hold_one_generation_at_every_step(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(Problem(m=4, n=8, k=16, dtype="fp32", threads=2), "torch_swap")], 1)
    first, second = (done.said for done in home.run_ranks(2, RANKS, WORLD_SIZE="", GEMMTUNED_RUN=""))

    assert first["seen"] == second["seen"]
    assert first["seen"][0] == 1  # before the profile run
    assert first["seen"][-1] == 13
    assert first["run"] == second["run"] == "vllm:tiny tp2"


def test_a_rank_without_the_plugin_is_not_waited_for_and_the_others_change_no_tables(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(Problem(m=4, n=8, k=16, dtype="fp32", threads=2), "torch_swap")], 1)
    lacking = RANKS.replace("gemmtuned._engines.vllm()\n", "if rank == 0:\n    gemmtuned._engines.vllm()\n").replace(
        "member.EVERY = 2\n", "member.EVERY = 2\nfrom hooked import wait_for\nmember.ranks.AGREE_S = 1.0\n"
        "wait_for(lambda: gemmtuned.generation() == 1)\n"
    ).replace("dist.destroy", "dist.barrier()  # the group is whole\ndist.destroy")  # fmt: skip
    first, second = (
        done.said
        for done in home.run_ranks(2, lacking + "assert not hasattr(worker, 'gemmtuned_recapture')", WORLD_SIZE="")
    )

    assert first["seen"] == second["seen"] == [1] * 21
