"""Triton kernels that merge and finish partial results, copy, add or fill rows, and sum products. Importing this file
needs Triton.

Rows are described by a table on the device, one line of COLUMNS int64 for each run (`run/tables.py`). A program handles
some rows of one run, of one batch row and one head; it finds its run by binary search over the first programs of the
runs. Strides and offsets are in bytes and have 64 bits. Numbers that differ between plans are not specialized on, so
that new plans compile nothing.
"""
# pyright: reportInvalidTypeForm=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS: tl.constexpr = tl.constexpr(10)
"""First program, flags, rows, heads; then three numbers of the source and three of the target: offset in bytes and
strides of batch rows and heads for a part of a message, else first batch row, head and token."""
SECOND: tl.constexpr = tl.constexpr(1)
"""Flag of runs between the second source and target."""
FROM_MESSAGE: tl.constexpr = tl.constexpr(2)
INTO_MESSAGE: tl.constexpr = tl.constexpr(4)
COPY: tl.constexpr = tl.constexpr(0)
ADD: tl.constexpr = tl.constexpr(1)
FILL: tl.constexpr = tl.constexpr(2)


@triton.jit
def _find_run(table, low, high, steps, program, ROWS: tl.constexpr):
    """Return the line of the run of a program, and its batch row, head and rows inside the run."""
    for _ in range(steps):  # the run lies in low to high
        middle = (low + high) // 2
        is_before = tl.load(table + middle * COLUMNS) <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    line = table + low * COLUMNS
    block = program - tl.load(line)
    rows, heads = tl.load(line + 2), tl.load(line + 3)
    blocks = tl.cdiv(rows, ROWS)
    plane = block // blocks
    i = (block % blocks) * ROWS + tl.arange(0, ROWS)
    return line, plane // heads, plane % heads, i, i < rows


@triton.jit
def _offset(at, is_part, b, h, by_batch, by_head, by_token):
    """Return the offset of a run's first row, for one batch row and head, from three numbers of its line."""
    x, y, z = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return tl.where(is_part, x + b * y + h * z, (x + b) * by_batch + (y + h) * by_head + z * by_token)


@triton.jit
def _rows(base, offset, i, by_token, ALIGNED: tl.constexpr):
    """Return pointers to rows. Triton vectorizes only if it sees that offsets are multiples of 16 bytes."""
    size: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    away = offset + i * by_token
    return base + (away // 16 * (16 // size) if ALIGNED else away // size)


@triton.jit(
    do_not_specialize=[
        "low", "high", "steps", "first", "value", "dim", "source_b", "source_h", "source_t",
        "target_b", "target_h", "target_t", "dim2", "source2_b", "source2_h", "source2_t",
        "target2_b", "target2_h", "target2_t",
    ]
)  # fmt: skip
def rows_kernel(
    table, low: tl.int64, high: tl.int64, steps: tl.int64, first: tl.int64, value: tl.int64,
    source, target, dim: tl.int64, source_b: tl.int64, source_h: tl.int64, source_t: tl.int64,
    target_b: tl.int64, target_h: tl.int64, target_t: tl.int64,
    source2, target2, dim2: tl.int64, source2_b: tl.int64, source2_h: tl.int64,
    source2_t: tl.int64, target2_b: tl.int64, target2_h: tl.int64, target2_t: tl.int64,
    KIND: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy, add or fill the rows of runs low to high, between one source and target, or two. Copies of
    one dtype are copies of words, so that all dtypes are the same kernel. Rows of a target are distinct."""
    line, b, h, i, known = _find_run(table, low, high, steps, tl.program_id(0).to(tl.int64) + first, ROWS)
    flags = tl.load(line + 1)
    d = tl.arange(0, DIM)
    TARGET: tl.constexpr = target.dtype.element_ty
    if (flags & SECOND) != 0:
        source, target, dim = source2, target2, dim2
        source_b, source_h, source_t = source2_b, source2_h, source2_t
        target_b, target_h, target_t = target2_b, target2_h, target2_t
    if ALIGNED:
        dim = dim // 16 * 16
    cells = known[:, None] & (d < dim)[None, :]
    offset = _offset(line + 7, (flags & INTO_MESSAGE) != 0, b, h, target_b, target_h, target_t)
    at = _rows(target, offset, i, target_t, ALIGNED)[:, None] + d[None, :]
    if KIND == FILL:
        tl.store(at, tl.full((ROWS, DIM), 0, TARGET) + value.to(TARGET), mask=cells)
    else:
        offset = _offset(line + 4, (flags & FROM_MESSAGE) != 0, b, h, source_b, source_h, source_t)
        place = _rows(source, offset, i, source_t, ALIGNED)[:, None] + d[None, :]
        part = tl.load(place, mask=cells, other=0)
        if KIND == ADD:
            whole = tl.load(at, mask=cells, other=0)
            tl.store(at, whole + part.to(TARGET), mask=cells)
        else:
            tl.store(at, part.to(TARGET), mask=cells)


@triton.jit(
    do_not_specialize=[
        "low", "high", "steps", "dim", "acc_b", "acc_h", "acc_t", "top_b", "top_h",
        "top_t", "num_b", "num_h", "num_t", "out_b", "out_h", "out_t", "lse_b", "lse_h", "lse_t",
    ]
)  # fmt: skip
def state_kernel(
    table, low: tl.int64, high: tl.int64, steps: tl.int64,
    acc, top, num, out, lse, dim: tl.int64,
    acc_b: tl.int64, acc_h: tl.int64, acc_t: tl.int64, top_b: tl.int64, top_h: tl.int64, top_t: tl.int64,
    num_b: tl.int64, num_h: tl.int64, num_t: tl.int64, out_b: tl.int64, out_h: tl.int64, out_t: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, lse_t: tl.int64,
    FINISH: tl.constexpr, TINY: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`run.merge.merge`: merge a partial (out, lse) into the state (acc, top, num), in place. FINISH:
    `run.merge.finished_rows`: write the (out, lse) of a state. Written rows are distinct."""
    line, b, h, i, known = _find_run(table, low, high, steps, tl.program_id(0).to(tl.int64), ROWS)
    WIDE: tl.constexpr = acc.dtype.element_ty
    state, part = line + 7, line + 4
    if FINISH:
        state, part = line + 4, line + 7
    d = tl.arange(0, DIM)
    if ALIGNED:
        dim = dim // 16 * 16
    cells = known[:, None] & (d < dim)[None, :]
    at_top = _rows(top, _offset(state, False, b, h, top_b, top_h, top_t), i, top_t, False)
    at_num = _rows(num, _offset(state, False, b, h, num_b, num_h, num_t), i, num_t, False)
    at_lse = _rows(lse, _offset(part, False, b, h, lse_b, lse_h, lse_t), i, lse_t, False)
    at_acc = _rows(acc, _offset(state, False, b, h, acc_b, acc_h, acc_t), i, acc_t, ALIGNED)
    at_acc = at_acc[:, None] + d[None, :]
    at_out = _rows(out, _offset(part, False, b, h, out_b, out_h, out_t), i, out_t, ALIGNED)
    at_out = at_out[:, None] + d[None, :]
    old_top, old_num = tl.load(at_top, mask=known, other=0.0), tl.load(at_num, mask=known, other=1.0)
    whole = tl.load(at_acc, mask=cells, other=0.0)
    if FINISH:
        least = tl.maximum(old_num, TINY, propagate_nan=tl.PropagateNan.ALL)
        if tl.float32 == WIDE:
            mean = tl.div_rn(whole, tl.broadcast_to(least[:, None], (ROWS, DIM)))
        else:
            mean = whole / least[:, None]
        tl.store(at_out, mean.to(out.dtype.element_ty), mask=cells)
        tl.store(at_lse, (old_top + tl.log(old_num)).to(lse.dtype.element_ty), mask=known)
    else:
        new_top = tl.load(at_lse, mask=known, other=0.0).to(WIDE)
        high_top = tl.maximum(old_top, new_top, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(high_top == float("-inf"), 0.0, high_top)  # -inf minus -inf is nan, not "nothing"
        old, new = tl.exp(old_top - base), tl.exp(new_top - base)
        tl.store(at_num, old_num * old + new, mask=known)
        tl.store(at_top, high_top, mask=known)
        value = tl.load(at_out, mask=cells, other=0.0)
        tl.store(at_acc, whole * old[:, None] + value.to(WIDE) * new[:, None], mask=cells)


@triton.jit(
    do_not_specialize=["tokens", "heads", "dim", "dout_b", "dout_h", "dout_t", "out_b", "out_h", "out_t"]
)  # fmt: skip
def products_kernel(
    dout, out, sums, tokens: tl.int64, heads: tl.int64, dim: tl.int64,
    dout_b: tl.int64, dout_h: tl.int64, dout_t: tl.int64, out_b: tl.int64, out_h: tl.int64, out_t: tl.int64,
    ROWS: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`run.passes.row_sums`: write the sums of dout * out over features, one for each row, one after the other."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens, ROWS)
    plane = program // blocks
    b, h = plane // heads, plane % heads
    i = (program % blocks) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    if ALIGNED:
        dim = dim // 16 * 16
    known = i < tokens
    cells = known[:, None] & (d < dim)[None, :]
    at_dout = _rows(dout, b * dout_b + h * dout_h, i, dout_t, ALIGNED)[:, None] + d[None, :]
    at_out = _rows(out, b * out_b + h * out_h, i, out_t, ALIGNED)[:, None] + d[None, :]
    WIDE: tl.constexpr = sums.dtype.element_ty
    products = tl.load(at_dout, mask=cells, other=0.0).to(WIDE) * tl.load(at_out, mask=cells, other=0.0).to(WIDE)
    tl.store(sums + plane * tokens + i, tl.sum(products, 1), mask=known)
