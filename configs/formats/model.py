"""A model's folder as rows, one for each weight: used where its product can be tuned, else with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gemmtuned.configs.aiter_columns import DTYPE_NAMES
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.model_shapes import plan, problems, read_config

MODEL: Final = "model"


def is_model(path: Path) -> bool:
    """Whether this is the folder of a Hugging Face model, or its config.json."""
    return (path / "config.json").is_file() if path.is_dir() else path.name == "config.json"


def read_model(path: Path) -> Imported:
    """Every weight of the model on one device, as an engine runs it. Raises ProblemError for a model we do not know."""
    config = read_config(path)
    planned = plan(config)
    found = Imported(path=str(path), format=MODEL, family=planned.kind, kind="untuned")
    dtype = DTYPE_NAMES.get(planned.dtype, planned.dtype or "bf16")
    for number, weight in enumerate(planned.weights, 1):
        row = {
            "name": weight.name, "n": weight.n, "k": weight.k, "batch": weight.batch, "bias": weight.bias,
            "layers": weight.count, "experts": weight.experts, "dtype": weight.dtype, "why": weight.why,
        }  # fmt: skip
        problem = next(iter(problems([weight], [1], dtype=dtype, threads=0, vision_ms=[1])), None)
        found.add(number, row, problem=problem, why=weight.left_out)
    found.notes += [f"{path}: {note}" for note in planned.notes]
    return found
