"""Wrapped weights: what torch multiplies in the end is counted and routed, and the wrappers do not notice."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from hooked import HERE, Home

RUN = f"import runpy; runpy.run_path({str(HERE / 'wrapped_programs.py')!r}, run_name='__main__')"
# torchao comes with no extra of ours: transformers would then import it in every program
TORCHAO = ("torchao_weight_only", "torchao_dynamic_activation") if find_spec("torchao") else ()
OF_ONE = ("lora", "int8_subclass", *TORCHAO)
OF_RANKS = ("fsdp", "tensor_parallel", "dtensor_products")
# Forward and backward of what each program multiplies; int8 activations go to aten::_int_mm.
CALLS = {
    "lora": 18, "int8_subclass": 3, "torchao_weight_only": 2, "torchao_dynamic_activation": 2,
    "fsdp": 5, "tensor_parallel": 5, "dtensor_products": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, native_cache: Any, fork_server: Any) -> Any:
    """What one process found."""
    home = Home(tmp_path_factory.mktemp("wrapped") / "home", native_cache, fork_server)
    return home.run(RUN, *OF_ONE, AITER_TUNE_GEMM="0").said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, native_cache: Any) -> Any:
    """What each of two ranks found."""
    home = Home(tmp_path_factory.mktemp("sharded") / "home", native_cache)
    return [done.said for done in home.run_ranks(2, RUN, *OF_RANKS, AITER_TUNE_GEMM="0")]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, native_cache: Any, fork_server: Any) -> Any:
    """What the first of two ranks found in two of the programs."""
    home = Home(tmp_path_factory.mktemp("shards") / "home", native_cache, fork_server.compiling)
    return home.run_ranks(2, RUN, "fsdp", "tensor_parallel", AITER_TUNE_GEMM="0")[0].said


def check(name: str, found: Any) -> None:
    assert found["captured"] == ""
    assert found["routed"] == ""
    assert found["failures"] == []
    assert found["calls"] == found["profiled"] == CALLS[name]
    assert found["hits"] == len(found["problems"])  # every problem that was seen had a route


@pytest.mark.long
@pytest.mark.parametrize("name", OF_ONE)
def test_a_wrapped_weight_is_counted_and_routed_as_what_torch_multiplies(alone: Any, name: str) -> None:
    check(name, alone[name])


@pytest.mark.long
@pytest.mark.parametrize("name", OF_RANKS)
def test_each_rank_counts_and_routes_its_shard(ranks: Any, name: str) -> None:
    for found in ranks:
        check(name, found[name])


def test_a_shard_is_a_problem_of_its_own(shards: Any) -> None:
    check("tensor_parallel", shards["tensor_parallel"])
    assert "fp32:6x24x64+bias" in shards["tensor_parallel"]["problems"]  # 48 rows of weight over two ranks
    check("fsdp", shards["fsdp"])
    assert "fp32:6x48x64+bias" in shards["fsdp"]["problems"]  # gathered before it is used
