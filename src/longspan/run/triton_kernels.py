"""Triton kernels that merge partial results and copy or add rows. Importing this file needs Triton.

Shapes: see merge.py and packing.py. A program handles some rows of one batch row and one head. All strides are
arguments, so that views need no copy; offsets have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    acc, top, num, out, lse, here, there, heads, rows, dim,
    acc_b, acc_h, acc_t, top_b, top_h, top_t, num_b, num_h, num_t, out_b, out_h, out_t, lse_b, lse_h, lse_t,
    ROWS: tl.constexpr, DIM: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """`run.merge.merge`: merge a partial (out, lse) into the state (acc, top, num), in place. BY_ROW: row here[i] of
    the partial into row there[i] of the state, whose rows are distinct."""
    blocks = tl.cdiv(rows, ROWS)
    plane = tl.program_id(0) // blocks
    b, h = (plane // heads).to(tl.int64), (plane % heads).to(tl.int64)
    i = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    known = i < rows
    s, t = i, i
    if BY_ROW:
        s = tl.load(there + i, mask=known, other=0).to(tl.int64)
        t = tl.load(here + i, mask=known, other=0).to(tl.int64)
    at_top, at_num = top + b * top_b + h * top_h + s * top_t, num + b * num_b + h * num_h + s * num_t
    old_top = tl.load(at_top, mask=known, other=0.0)
    new_top = tl.load(lse + b * lse_b + h * lse_h + t * lse_t, mask=known, other=0.0).to(old_top.dtype)
    high = tl.maximum(old_top, new_top, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(high == float("-inf"), 0.0, high)  # -inf minus -inf is nan, not "nothing"
    old, new = tl.exp(old_top - base), tl.exp(new_top - base)
    tl.store(at_num, tl.load(at_num, mask=known, other=0.0) * old + new, mask=known)
    tl.store(at_top, high, mask=known)
    cells = known[:, None] & (d < dim)[None, :]
    at_acc = acc + b * acc_b + h * acc_h + s[:, None] * acc_t + d[None, :]
    part = tl.load(out + b * out_b + h * out_h + t[:, None] * out_t + d[None, :], mask=cells, other=0.0)
    whole = tl.load(at_acc, mask=cells, other=0.0)
    tl.store(at_acc, whole * old[:, None] + part.to(whole.dtype) * new[:, None], mask=cells)


@triton.jit
def _move_rows(
    block, source, target, here, there, heads, rows, dim,
    source_b, source_h, source_t, target_b, target_h, target_t,
    ROWS: tl.constexpr, DIM: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One block of rows: target[there[i]] = source[here[i]], or += with ADDS."""
    blocks = tl.cdiv(rows, ROWS)
    plane = block // blocks
    b, h = (plane // heads).to(tl.int64), (plane % heads).to(tl.int64)
    i = (block % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    cells = (i < rows)[:, None] & (d < dim)[None, :]
    row = tl.load(here + i, mask=i < rows, other=0).to(tl.int64)
    place = tl.load(there + i, mask=i < rows, other=0).to(tl.int64)
    part = tl.load(source + b * source_b + h * source_h + row[:, None] * source_t + d[None, :], mask=cells, other=0.0)
    at = target + b * target_b + h * target_h + place[:, None] * target_t + d[None, :]
    if ADDS:
        whole = tl.load(at, mask=cells, other=0.0)
        tl.store(at, whole + part.to(whole.dtype), mask=cells)
    else:
        tl.store(at, part.to(target.dtype.element_ty), mask=cells)


@triton.jit
def rows_kernel(
    source, target, here, there, heads, rows, dim,
    source_b, source_h, source_t, target_b, target_h, target_t,
    ROWS: tl.constexpr, DIM: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """target[there[i]] = source[here[i]], or += with ADDS. Rows of the target are distinct."""
    _move_rows(
        tl.program_id(0), source, target, here, there, heads, rows, dim,
        source_b, source_h, source_t, target_b, target_h, target_t, ROWS, DIM, ADDS,
    )  # fmt: skip


@triton.jit
def two_rows_kernel(
    source, target, here, there, heads, rows, dim,
    source_b, source_h, source_t, target_b, target_h, target_t,
    source2, target2, here2, there2, heads2, rows2, dim2,
    source2_b, source2_h, source2_t, target2_b, target2_h, target2_t,
    first,
    ROWS: tl.constexpr, DIM: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Two independent moves, such as K and V: the `first` programs run one, the rest the other."""
    block = tl.program_id(0)
    if block < first:
        _move_rows(
            block, source, target, here, there, heads, rows, dim,
            source_b, source_h, source_t, target_b, target_h, target_t, ROWS, DIM, ADDS,
        )  # fmt: skip
    else:
        _move_rows(
            block - first, source2, target2, here2, there2, heads2, rows2, dim2,
            source2_b, source2_h, source2_t, target2_b, target2_h, target2_t, ROWS, DIM, ADDS,
        )  # fmt: skip
