"""The functions of the package say what they were given where it cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gemmtuned


@pytest.mark.parametrize(
    "given", [None, torch.ones(2, 2), "model", torch.nn.Linear], ids=lambda given: type(given).__name__
)
def test_what_is_no_module_is_said(given: Any) -> None:
    for call in (gemmtuned.freeze, gemmtuned.unfreeze):
        with pytest.raises(TypeError, match=f"{call.__name__}: expected a torch.nn.Module, got {type(given).__name__}"):
            call(given)


@pytest.mark.parametrize("given", [None, "5", [1]], ids=repr)
def test_what_is_no_number_of_seconds_is_said(given: Any) -> None:
    with pytest.raises(TypeError, match=r"ready: timeout is .*, expected seconds"):
        gemmtuned.ready(given)
    assert gemmtuned.ready(0)
