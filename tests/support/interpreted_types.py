"""What Triton's interpreter gets wrong about e4m3 and bf16, put right with torch's own conversions."""

import torch
import triton.language as tl
from triton.runtime import interpreter

TORCHS = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}


def teach_fp8_and_bf16() -> None:
    """For the whole process: e4m3 has NaN in products, and fp32 becomes bf16 and e4m3 by rounding to the nearest.

    The interpreter takes NaN of e4m3 for 480, cuts off where a device rounds to bf16, and loses the carry of what
    rounds up to the next power of two in e4m3.
    """
    builder = interpreter.InterpreterBuilder
    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def widened(handle):
        if handle.dtype.scalar != tl.float8e4nv:
            return handle
        values = torch.from_numpy(handle.data).view(torch.float8_e4m3fn).float()
        return interpreter.TensorHandle(values.numpy(), tl.float32)

    def create_dot(self, a, b, d, precision, imprecise):
        return dot(self, widened(a), widened(b), d, precision, imprecise)

    def rounded(src, dst_type):
        """None for other types."""
        if src.dtype.scalar != tl.float32 or dst_type.scalar not in TORCHS:
            return None
        dtype, bits = TORCHS[dst_type.scalar]
        return interpreter.TensorHandle(torch.from_numpy(src.data).to(dtype).view(bits).numpy(), dst_type.scalar)

    def cast_impl(self, src, dst_type):
        found = rounded(src, dst_type)  # a handle's truth is that of its numbers
        return cast(self, src, dst_type) if found is None else found

    def create_fp_to_fp(self, src, dst_type, mode):
        found = rounded(src, dst_type)
        return convert(self, src, dst_type, mode) if found is None else found

    for name in ("create_fp_trunc", "cast_impl"):
        setattr(builder, name, cast_impl)
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_dot = create_dot
