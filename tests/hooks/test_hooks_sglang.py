"""Our plugin in SGLang: registered by names that are there alone, and never in the way of what it wraps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmtuned.hooks import activate, phase
from gemmtuned.hooks.engines import sglang


class HookType(Enum):
    """As SGLang 0.5.23 has it."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class Registry:
    """As SGLang's HookRegistry: hooks by the name of what they are put around."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Callable[..., Any], HookType]] = {}

    def register(self, name: str, hook: Callable[..., Any], kind: HookType) -> None:
        self.found[name.rpartition("srt.")[2]] = hook, kind


class Runner:
    """As a ModelRunner."""

    server_args = SimpleNamespace(served_model_name="tiny", model_path="/m", tp_size=1)

    def initialize(self) -> str:
        return f"initialized {phase.current()}"

    def forward(self) -> None:
        """Run the model."""

    def init_decode_cuda_graph(self) -> str:
        return f"graphs {phase.current()}"


def stand_ins(**classes: type) -> tuple[Registry, dict[str, ModuleType]]:
    registry = Registry()
    names = {
        "sglang.srt.plugins.hook_registry": {"HookType": HookType, "HookRegistry": registry},
        "sglang.srt.model_executor.model_runner": {"ModelRunner": classes.get("runner", Runner)},
        "sglang.srt.model_executor.runner.base_runner": {"BaseRunner": type("BaseRunner", (), {"warmup": print})},
        "sglang.srt.server_args": {"ServerArgs": type("ServerArgs", (), {"check_server_args": print})},
    }
    made: dict[str, ModuleType] = {}
    for name, members in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(made[name]).update(members)
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, module)
        module.__path__ = []  # type: ignore[attr-defined]
    return registry, made


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    found, made = stand_ins()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    sglang.install()
    yield found
    sglang._together.clear()


def test_all_of_the_version_that_it_was_written_for_is_registered(registry: Registry) -> None:
    assert {name: kind.value for name, (_, kind) in registry.found.items()} == {
        "server_args.ServerArgs.check_server_args": "after",
        "model_executor.model_runner.ModelRunner.initialize": "around",
        "model_executor.model_runner.ModelRunner.forward": "before",
        "model_executor.model_runner.ModelRunner.init_decode_cuda_graph": "around",
        "model_executor.runner.base_runner.BaseRunner.warmup": "around",
    }


def test_a_version_that_lacks_a_method_has_the_others_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = stand_ins(runner=type("ModelRunner", (), {"initialize": print}))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    sglang.install()

    assert "model_executor.model_runner.ModelRunner.initialize" in found.found
    assert not [name for name in found.found if "forward" in name or "graph" in name]


def test_the_model_is_made_as_without_us_and_graphs_are_a_warm_up(registry: Registry) -> None:
    around_model, _ = registry.found["model_executor.model_runner.ModelRunner.initialize"]
    around_graphs, _ = registry.found["model_executor.model_runner.ModelRunner.init_decode_cuda_graph"]
    before_step, _ = registry.found["model_executor.model_runner.ModelRunner.forward"]
    runner = Runner()

    assert activate.current() is None
    assert around_model(Runner.initialize, runner) == "initialized "
    assert around_graphs(Runner.init_decode_cuda_graph, runner) == "graphs warm-up"
    assert before_step(runner, "batch") is None  # None: SGLang keeps the arguments


def test_the_scheduler_is_labelled_once_and_says_so(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    joined: list[tuple[str, str]] = []
    monkeypatch.setattr(sglang.member, "join", lambda run, role: bool(joined.append((run, role))))
    monkeypatch.setattr(sglang.member, "role", lambda: joined[-1][1] if joined else "")
    around_model, _ = registry.found["model_executor.model_runner.ModelRunner.initialize"]
    for _ in range(2):
        around_model(Runner.initialize, Runner())
    assert joined == [("sglang:tiny", "scheduler rank 0")]


def test_what_cannot_be_read_is_one_line_and_the_engine_goes_on(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    after_arguments, _ = registry.found["server_args.ServerArgs.check_server_args"]
    assert after_arguments("result", SimpleNamespace()) is None
    assert "left out with this version" in caplog.text


def test_a_split_model_has_a_label_of_its_own() -> None:
    arguments = SimpleNamespace(served_model_name="", model_path="/m", tp_size=4)
    assert sglang.label_of(arguments) == "sglang:/m tp4"
