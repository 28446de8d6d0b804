"""Steps 1, 2 and 6: Q of docs/numerics.md for rows of hidden_states, and for rows after the activation."""

import triton
import triton.language as tl

from .elementary import bits_of, float_of, round_half_even
from .formats import widen

INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def _load(x_ptr, x_column_stride, row_start, first, columns, live, factor, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    column = first + tl.arange(0, WIDTH)
    offsets = row_start[:, None] + (column.to(tl.int64) * x_column_stride)[None, :]
    mask = live[:, None] & (column < columns)[None, :]
    return widen(tl.load(x_ptr + offsets, mask=mask, other=0), FORMAT) * factor[:, None]


@triton.jit(do_not_specialize=["factor_stride", "rows"])
def quantize_rows(
    x_ptr,
    x_row_stride,
    x_column_stride,
    factor_ptr,
    factor_stride,
    q_ptr,
    q_row_stride,
    scale_ptr,
    rows,
    columns,
    FORMAT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """X ``[rows, columns]`` -> q int8 ``[rows, columns]``, scale fp32 ``[rows]``; ROWS rows a program.

    factor fp32 ``[rows]`` multiplies a row first (router weight on the input).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    row_start = row * x_row_stride
    factor = tl.full([ROWS], 1.0, tl.float32)  # x * 1 is x
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + row * factor_stride, mask=live, other=0.0)
    # Compared as integers, so that NaN > Inf > any finite value.
    largest = tl.zeros([ROWS], tl.int32)
    for first in range(0, columns, WIDTH):
        values = _load(x_ptr, x_column_stride, row_start, first, columns, live, factor, FORMAT, WIDTH)
        largest = tl.maximum(largest, tl.max(bits_of(values) & 0x7FFFFFFF, axis=1))
    finite = largest < INFINITY_BITS
    some = finite & (largest > 0)
    amax = float_of(tl.where(some, largest, 0x3F800000))  # 1 where it is not used
    full_scale = tl.full([ROWS], 127.0, tl.float32)
    inverse = tl.div_rn(full_scale, amax)
    alive = some & (bits_of(inverse) < INFINITY_BITS)
    scale = tl.where(alive, tl.div_rn(amax, full_scale), 0.0)
    tl.store(scale_ptr + row, tl.where(finite, scale, float_of(tl.full([ROWS], NAN_BITS, tl.int32))), mask=live)
    for first in range(0, columns, WIDTH):
        values = _load(x_ptr, x_column_stride, row_start, first, columns, live, factor, FORMAT, WIDTH)
        # A row of zeros may hold Inf or NaN: its products are thrown away before the conversion.
        scaled = tl.where(alive[:, None], round_half_even(values * inverse[:, None]), 0.0)
        scaled = tl.where(scaled > 127.0, 127.0, scaled)
        scaled = tl.where(scaled < -127.0, -127.0, scaled)
        column = first + tl.arange(0, WIDTH)
        mask = live[:, None] & (column < columns)[None, :]
        tl.store(q_ptr + row[:, None] * q_row_stride + column[None, :], scaled.to(tl.int8), mask=mask)
