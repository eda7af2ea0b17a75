"""Kernels for the test of Triton's interpreter itself."""

# mypy: disallow-untyped-defs=False
import triton
import triton.language as tl


@triton.jit
def round_to_bfloat16(x, y, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    """Out = a·b."""
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))
