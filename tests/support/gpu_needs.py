"""What tests need of the machine's GPU, as marks: a module's pytestmark, or a test's decorators."""

from __future__ import annotations

from typing import Final

import pytest
import torch

_NVIDIA: Final = torch.cuda.is_available() and torch.version.hip is None
_CAPABILITY: Final = torch.cuda.get_device_capability() if _NVIDIA else (0, 0)

NVIDIA: Final = pytest.mark.skipif(not _NVIDIA, reason="needs an NVIDIA GPU")
SM_90: Final = pytest.mark.skipif(_CAPABILITY != (9, 0), reason="needs an NVIDIA GPU of sm_90")
SM_90_OR_LATER: Final = pytest.mark.skipif(_CAPABILITY < (9, 0), reason="needs an NVIDIA GPU of sm_90 or later")
TWO: Final = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
