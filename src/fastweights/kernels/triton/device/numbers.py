"""Real and complex numbers in kernels: tuples of tiles, ``(real,)`` or ``(real, imaginary)``.

A stream of them is a `Numbers` of the host: the pointers of its parts and the distances between
batches, tokens, heads and columns.

Functions of two numbers take the one with more parts first: before Triton 3.7 a kernel has one
version of a function for all arguments that are alike when their tuples are taken apart, so that a
real number times a complex one would be computed as a complex one times a real one.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def times(a, b):
    """a b, where b has no part that a lacks."""
    tl.static_assert(len(a) >= len(b))
    if len(a) == 1:
        return (a[0] * b[0],)
    elif len(b) == 1:
        return (a[0] * b[0], a[1] * b[0])
    else:
        return (a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0])


@triton.jit
def times_conjugate(a, b):
    """a b̄, where b has no part that a lacks."""
    tl.static_assert(len(a) >= len(b))
    if len(b) == 1:
        return times(a, b)
    else:
        return (a[0] * b[0] + a[1] * b[1], a[1] * b[0] - a[0] * b[1])


@triton.jit
def plus(a, b):
    """a + b, where b has no part that a lacks."""
    tl.static_assert(len(a) >= len(b))
    if len(a) == 1:
        return (a[0] + b[0],)
    elif len(b) == 1:
        return (a[0] + b[0], a[1])
    else:
        return (a[0] + b[0], a[1] + b[1])


@triton.jit
def minus(a, b):
    """a - b, where b has no part that a lacks."""
    tl.static_assert(len(a) >= len(b))
    if len(b) == 1:
        if len(a) == 1:
            return (a[0] - b[0],)
        else:
            return (a[0] - b[0], a[1])
    else:
        return (a[0] - b[0], a[1] - b[1])


@triton.jit
def sum_of(a, axis: tl.constexpr):
    """Σ along an axis, which stays with length 1."""
    if len(a) == 1:
        return (tl.sum(a[0], axis, keep_dims=True),)
    else:
        return (tl.sum(a[0], axis, keep_dims=True), tl.sum(a[1], axis, keep_dims=True))


@triton.jit
def exponential(a):
    """e^a; 0 where the real part is −inf."""
    size = tl.exp2(a[0] * LOG2_E)
    if len(a) == 1:
        return (size,)
    else:
        return (size * tl.cos(a[1]), size * tl.sin(a[1]))


@triton.jit
def one_minus_exp(x):
    """1 - e^x to float32's accuracy, for real x ≤ 0."""
    # -x (1 + x/2 (1 + x/3 (… (1 + x/8)))) near 0, where the difference would lose digits
    small = 1 + x / 8
    for n in tl.static_range(7, 1, -1):
        small = 1 + x / n * small
    return tl.where(x > -0.5, -tl.where(x > -0.5, x, 0.0) * small, 1 - tl.exp2(x * LOG2_E))


@triton.jit
def choose(condition, a, b):
    """a where the condition holds, else b, which is real."""
    if len(a) == 1:
        return (tl.where(condition, a[0], b),)
    else:
        return (tl.where(condition, a[0], b), tl.where(condition, a[1], 0.0))


@triton.jit
def parts_for(x, a):
    """As many parts of a as the numbers of a stream have."""
    if len(x.data) == 1:
        return (a[0],)
    else:
        return a


@triton.jit
def zeros(height: tl.constexpr, width: tl.constexpr, parts: tl.constexpr):
    """[height, width] numbers 0 of 1 or 2 parts."""
    if parts == 1:
        return (tl.zeros([height, width], tl.float32),)
    else:
        return (tl.zeros([height, width], tl.float32), tl.zeros([height, width], tl.float32))


@triton.jit
def places_of(x, b, t, heads, columns):
    """Of the numbers at token t, in elements from the first: heads [1, L], columns [K, 1]."""
    token = tl.cast(b, tl.int64) * x.batch + tl.cast(t, tl.int64) * x.time
    return token + tl.cast(heads, tl.int64) * x.head + columns * x.column


@triton.jit
def read(x, b, t, heads, columns, inside):
    """Numbers of a stream in float32, [K, L]; 0 where they are not inside."""
    places = places_of(x, b, t, heads, columns)
    real = tl.load(x.data[0] + places, mask=inside, other=0.0).to(tl.float32)
    if len(x.data) == 1:
        return (real,)
    else:
        return (real, tl.load(x.data[1] + places, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def write(x, b, t, heads, columns, inside, a):
    """Numbers to where `read` finds them, in the stream's dtype; a real stream keeps real parts."""
    places = places_of(x, b, t, heads, columns)
    tl.store(x.data[0] + places, a[0].to(x.data[0].dtype.element_ty), mask=inside)
    if len(x.data) == 2:
        tl.store(x.data[1] + places, a[1].to(x.data[1].dtype.element_ty), mask=inside)


@triton.jit
def read_row(parts, row, j: tl.constexpr, keys, K: tl.constexpr, inside):
    """Numbers [K, 1] in row `row` + j of a matrix of width K; 0 where they are not inside.

    The parts of complex ones alternate. The distance to row j is known when this is compiled, and
    takes no registers.
    """
    places = (row * K + keys + j * K) * len(parts)
    real = tl.load(parts[0] + places, mask=inside, other=0.0).to(tl.float32)
    if len(parts) == 1:
        return (real,)
    else:
        return (real, tl.load(parts[1] + places, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def write_row(parts, row, j: tl.constexpr, keys, K: tl.constexpr, inside, a):
    """Numbers to where `read_row` finds them, in float32."""
    places = (row * K + keys + j * K) * len(parts)
    tl.store(parts[0] + places, a[0], mask=inside)
    if len(parts) == 2:
        tl.store(parts[1] + places, a[1], mask=inside)
