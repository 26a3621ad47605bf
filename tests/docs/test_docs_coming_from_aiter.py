"""The page for those who come from AITER: what it says is there, and what it shows runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typed import environment

from gemmtuned.cli import build
from gemmtuned.commands.aiter_flags import NO_EFFECT, translate
from gemmtuned.configs.model_shapes import known
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.shim import _modules

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from-aiter.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
# Every flag that one of the five documents shows, in its spelling
FLAGS = (
    "-i", "-o", "-o2", "--profile_file", "--sort", "--errRatio", "--mp", "--batch", "--all", "--warmup", "--iters",
    "--timeout", "-v", "--verbose", "--libtype", "--tuned_file", "--input_file", "--model_dir", "--tp", "--nsets",
    "--batch-size", "--input-type", "--out-dtype",
)  # fmt: skip
SCRIPT = """
import time
import torch
layer = torch.nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
with torch.inference_mode():
    for _ in range(3):
        layer(torch.randn(16, 128, dtype=torch.bfloat16))
time.sleep(1)  # on a loaded machine the first flush, which makes the database, takes longer than an exit waits for it
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder with what a user has: a program and a model."""
    (tmp_path / "your_inference_script.py").write_text(SCRIPT)
    model = tmp_path / "my_model"
    model.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "bf16_untuned_gemm.csv").write_text("M,N,K\n16,128,128\n")
    yield tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("beside_others")
@pytest.mark.parametrize("section", SECTIONS)
def test_what_the_page_shows_runs(section: str, place: Path, native_cache: Path) -> None:
    env = environment(place, native_cache)
    fences = re.findall(r"^```(console|python)\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)
    assert fences
    for kind, text in fences:
        for command, code, said in _commands(kind, text):
            done = subprocess.run(["sh", "-c", command], cwd=place, env=env, capture_output=True, text=True, timeout=90)
            assert done.returncode == code, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            assert "Traceback" not in done.stderr, done.stderr
            for line in said:
                assert line in done.stdout + done.stderr, f"{command}: {line}\n{done.stdout[-2000:]}\n{done.stderr}"


def _commands(kind: str, text: str) -> list[tuple[str, int, list[str]]]:
    """(command, how it ends, lines it says) of a box."""
    if kind == "python":
        return [(f"python -c {shlex.quote(text)}", 0, [])]
    found: list[tuple[str, int, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            command, _, comment = line.removeprefix("$ ").partition("   # ends with ")
            found.append((command, int(comment or 0), []))
        else:
            found[-1][2].append(line)
    return found


def test_five_documents_are_walked_through() -> None:
    assert len(SECTIONS) == 5


def test_the_page_names_every_flag_and_each_is_taken() -> None:
    table = PAGE.partition("## Flags of the tuners")[2].partition("## Variables")[0]
    named = set(re.findall(r"`(-[A-Za-z0-9_-]+)`", table))

    assert {flag for flag in (*FLAGS, *NO_EFFECT) if not {flag, "--" + flag[2:].replace("-", "_")} & named} == set()
    tune = typer.main.get_command(build()).commands["tune"]
    known = {name for param in tune.params for name in param.opts}

    for flag in named - {"-k"}:
        args, said = translate([flag, "1"] if flag in ("--batch", "--blockPerCu") else [flag])
        assert said or args[0].split("=")[0] in known, flag


def test_the_page_names_every_variable_of_aiters_that_is_read() -> None:
    read = {v.name for v in VARIABLES if v.name.startswith("AITER_") and not v.name.startswith("AITER_CONFIG_")}

    assert {name for name in read if f"`{name}`" not in PAGE} == set()


def test_the_page_names_what_the_shim_offers() -> None:
    offered = {member for members in _modules().values() for member in members}

    assert {name for name in offered if name not in PAGE} == set()


def test_the_number_of_models_is_the_one_that_is_told() -> None:
    assert f"reads {len(known())} kinds of models" in PAGE
