"""Classes shaped as those of vLLM 0.32 that our plugin touches, put into sys.modules where vLLM itself cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class Worker:
    """Runs the model; `step` is called in what it does."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.called: list[str] = []

    def init_device(self) -> None:
        self.called.append("init_device")

    def determine_available_memory(self) -> int:
        self.step()
        return 1 << 30

    def compile_or_warm_up_model(self) -> str:
        self.step()
        return "times"

    def execute_model(self, batch: object) -> object:
        self.step()
        return batch


def config(name: str = "tiny", *, split: int = 1, rank: int = 0) -> Any:
    """As much of a VllmConfig as we read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=name, model="/models/tiny"),
        parallel_config=SimpleNamespace(tensor_parallel_size=split, rank=rank),
    )


def modules() -> dict[str, ModuleType]:
    """By name, made anew."""

    class VllmConfig:
        def __init__(self) -> None:
            self.__dict__.update(vars(config()))
            self.__post_init__()

        def __post_init__(self) -> None:
            self.made = True

    class WorkerWrapperBase:
        def __init__(self, worker: Worker, vllm_config: Any) -> None:
            self.worker, self.vllm_config = worker, vllm_config

        def init_device(self) -> None:
            self.worker.init_device()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    class EngineCore:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config
            self._initialize_kv_caches(vllm_config)

        def _initialize_kv_caches(self, vllm_config: Any) -> None:
            self.caches = vllm_config

    made = {name: ModuleType(name) for name in (
        "vllm", "vllm.config", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.worker_base", "vllm.v1.engine",
        "vllm.v1.engine.core",
    )}  # fmt: skip
    made["vllm.config"].VllmConfig = VllmConfig  # type: ignore[attr-defined]
    made["vllm.v1.worker.worker_base"].WorkerWrapperBase = WorkerWrapperBase  # type: ignore[attr-defined]
    made["vllm.v1.engine.core"].EngineCore = EngineCore  # type: ignore[attr-defined]
    return made


def take_place() -> dict[str, ModuleType]:
    """Have `import vllm` find these."""
    made = modules()
    sys.modules.update(made)
    return made


class Runner:
    """A worker's model runner: captures graphs, or fails to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.did: list[str] = []
        self.fails = fails
        self.cudagraph_dispatcher = self

    def capture_model(self) -> int:
        self.did.append("capture")
        if self.fails:
            raise RuntimeError("out of memory")
        return 0

    def initialize_cudagraph_keys(self, mode: object) -> None:
        self.did.append(f"keys {mode}")


class Manager:
    """Of vLLM's second runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def release_graphs(self) -> None:
        self.runner.did.append("release")
