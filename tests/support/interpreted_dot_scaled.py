"""tl.dot_scaled of e2m1 by e2m1 in Triton's interpreter, which has none: as the instruction is documented, in fp32."""

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_E2M1 = np.concatenate([_SIZES, -_SIZES])


def teach_dot_scaled() -> None:
    """For the whole process."""
    plain = semantic.TritonSemantic.dot_scaled

    def dot_scaled(self, *operands):  # formats come as constants, in the interpreter as plain words
        return plain(self, *(tl.constexpr(one) if isinstance(one, str) else one for one in operands))

    semantic.TritonSemantic.dot_scaled = dot_scaled
    interpreter.InterpreterBuilder.create_dot_scaled = _create_dot_scaled


def _create_dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, fast_math, lhs_k, rhs_k, acc):
    assert lhs_k and rhs_k and not fast_math, "codes lie along K"
    a, b = _numbers(lhs.data, lhs_scale.data), _numbers(rhs.data.T, rhs_scale.data)
    return interpreter.TensorHandle(acc.data + a @ b.T, tl.float32)


def _numbers(codes, scales):
    """[rows, K] of codes [rows, K / 2], the lower first, and powers of two [rows, K / 32], of which 255 is NaN."""
    rows, half = codes.shape
    values = _E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(rows, 2 * half)]
    powers = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127)).astype(np.float32)
    return values * np.repeat(powers, 32, axis=1)
