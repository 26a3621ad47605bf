"""The examples run at tiny sizes, print their figure, and every GEMM that torch's profiler sees is counted."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
from hooked import HERE, Home

RUN = f"import runpy; runpy.run_path({str(HERE / 'example_program.py')!r}, run_name='__main__')"
TINY = {
    "decode.py": "--layers 1 --steps 2 --no-graph",  # the profiler sees what a graph holds once, we at each replay
    "decode_compiled.py": "--layers 1 --steps 2 --no-graph",
    "fp8_moe.py": "--hidden 64 --inter 32 --experts 4 --top 2 --layers 2 --vocabulary 128 --tokens 8 --steps 2",
    "diffusion.py": "--hidden 64 --heads 2 --layers 2 --patches 96 --steps 2",
    "tensor_parallel.py": "--hidden 64 --inter 128 --layers 2 --tokens 8 --steps 4",
}
FIGURE = re.compile(r"([0-9.]+) (tokens|steps)/s")


def check(said: Any) -> None:
    found = FIGURE.search(said["said"])
    assert found and float(found[1]) > 0
    assert said["counted"] == said["profiled"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["decode.py", "fp8_moe.py", "diffusion.py"])
def test_an_example_is_counted_call_by_call(home: Home, name: str) -> None:
    if name.startswith("decode"):
        pytest.importorskip("transformers")
    said = home.run(RUN, name, *TINY[name].split()).said

    check(said)
    if name == "diffusion.py":
        assert "bf16:192x192x64+bias" in said["problems"]  # both halves of the guidance at once: a large M
    if name == "fp8_moe.py":
        assert "bf16:8x4x64" in said["problems"]  # the router


@pytest.mark.soak
def test_the_compiled_example_is_counted_at_run_time(home: Home) -> None:
    pytest.importorskip("transformers")
    check(home.run(RUN, "decode_compiled.py", *TINY["decode_compiled.py"].split()).said)


@pytest.mark.long
def test_two_ranks_count_their_shards(home: Home) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = home.run_ranks(2, RUN, "tensor_parallel.py", *TINY["tensor_parallel.py"].split(),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port, CUDA_VISIBLE_DEVICES="")  # fmt: skip

    first, second = (done.said for done in both)
    check(first)
    assert second["counted"] == second["profiled"] == first["counted"] == 2 * 2 * 7
    assert first["problems"] == second["problems"] == ["bf16:8x128x64", "bf16:8x64x64"]
