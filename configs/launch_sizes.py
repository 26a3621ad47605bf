"""How much the native hook has room for in a launch record (cuda_launch.h, operator_call.h)."""

from __future__ import annotations

from typing import Final

MAX_ARGUMENTS: Final = 24  # per kernel
MAX_MAPS: Final = 2  # among them (tensor_map.h)
MAX_OPERATOR_ARGUMENTS: Final = 16
MAX_INTEGERS: Final = 8  # per list that an operator is given
MAX_TEXT: Final = 31  # characters of an operator's constant
