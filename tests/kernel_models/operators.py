"""PyTorch's fused GPU operators as models by address: what each reads, where it thinks that lies, what it writes.

Each has the signature of its wrapper in `longspan._torch`, computes in float64 from what it would read (see
`memory`), and raises where the operator does or where a kernel would read in vectors what does not lie so. Beside each
stands the source that it follows; none of it was compared with a GPU. `aten` is aten/src/ATen/native of PyTorch 2.13
to 2.15, of which transformers/cuda/flash_attn/flash_api.cpp was read at 03b7c19d; `FlashAttention` is
github.com/Dao-AILab/flash-attention at 0251105 (15 August 2026).

`t`: the stride is taken from the tensor; `d`: taken for dense.

    operator, direction         operand        dims    strides   remarks
    flash, both                 q, k, v        BSHD    tttd      last stride checked; rows in vectors, unchecked
    flash, backward             dout, out      BSHD    dddd      copied first, if not contiguous
    flash, backward             lse            BHS     ddd       unchecked
    varlen, both                q, k, v        THD     ttd       as flash
    varlen, both                starts         N       d         checked; int32
    varlen, backward            dout, out      THD     ddd       copied first
    varlen, backward            lse            HT      dd        unchecked
    fa3, fa4, both              q, k, v        as flash and varlen; v may be narrower, (192, 128)
    fa3, fa4, backward          dout, out      as q              by their strides, in vectors
    fa3, fa4, backward          lse            as flash and varlen
    efficient, both             q, k, v        BSHD    tttd      last stride and vectors checked; no groups of heads
    efficient, both             bias           BHSK    tttd      read in runs of 16
    efficient, backward         dout           BSHD    dddd      copied first
    efficient, backward, half   out            BSHD    tdtd      rows taken for H * D apart, unchecked
    efficient, backward, float  out            BSHD    tttd      delta is made by PyTorch's operators, which look
    efficient, backward         lse            BHR     ttd       R: rows rounded up to 32; +inf behind the last row
    cudnn, both                 q, k, v        BHSD    tttd      more than one key, and more than one query
    cudnn, both                 bias           BHSK    tttd
    cudnn, backward             dout, out      BHSD    dddd      a graph is found again by q, k, v and bias alone
    cudnn, backward             lse            BHS1    dddd      unchecked (pytorch#176915)
    cudnn_packed, both          q, k, v        THD     ddd       16 bytes; offsets of 32 bits; full, or causal top-left
    cudnn_packed, backward      dout, out      THD     ddd       as q
    cudnn_packed, both          lse            HT      dd        (T, H, 1) before PyTorch 2.14

PyTorch passes the strides of THD tensors on to cuDNN, which takes few orders of dims: this model takes dense ones only.

Results: flash and cudnn lay out `out`, dq, dk and dv like the input they belong to (empty_like), efficient as
(B, S, H, D); lse is dense.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from tests.kernel_models.memory import AddressError, Reads, like_input, read, written

DENSE_4 = Reads("dddd", copied=True)
FLASH = {"q": Reads("tttd"), "dout": DENSE_4, "out": DENSE_4, "lse": Reads("ddd", vectors=False)}
BY_STRIDES = {**FLASH, "dout": Reads("tttd"), "out": Reads("tttd")}
VARLEN = {
    "q": Reads("ttd"),
    "dout": Reads("ddd", copied=True),
    "out": Reads("ddd", copied=True),
    "lse": Reads("dd", vectors=False),
}
VARLEN_BY_STRIDES = {**VARLEN, "dout": Reads("ttd"), "out": Reads("ttd")}
EFFICIENT = {
    "q": Reads("tttd"),
    "bias": Reads("tttd", run=16),
    "dout": DENSE_4,
    "out": Reads("tdtd"),
    "out in float32": Reads("tttd"),
    "lse": Reads("ttd", vectors=False),
}
CUDNN = {
    "q": Reads("tttd"),
    "bias": Reads("tttd", run=16),
    "dout": Reads("dddd"),
    "out": Reads("dddd"),
    "lse": Reads("dddd", vectors=False),
}
PACKED = Reads("ddd")
CUDNN_ROWS = 128
"""PyTorch runs packed slices on cuDNN only if the longest has more rows."""
HALF = (torch.bfloat16, torch.float16)
ROWS_FIRST = (0, 2, 1, 3)
"""Dims of (B, H, S, D) in the order of (B, S, H, D)."""


# ---- attention in float64 --------------------------------------------------------------------------------------------


def _grouped(x_BHQD, groups):
    b, heads, rows, dim = x_BHQD.shape
    return x_BHQD.reshape(b, groups, heads // groups, rows, dim)


def _scores(q, k, hidden, bias, scale):
    """(B, G, share, Q, K) scaled scores, -inf where `hidden`."""
    scores = _grouped(q, k.shape[1]) @ k[:, :, None].swapaxes(-1, -2) * scale
    scores = np.where(hidden, -np.inf, scores)
    return scores if bias is None else scores + _grouped(bias, k.shape[1])


def _attend(q, k, v, hidden, bias, scale):
    """(out, lse) of (B, H, Q, D) queries and (B, G, K, D) keys; NaN where a row sees nothing."""
    scores = _scores(q, k, hidden, bias, scale)
    with np.errstate(all="ignore"):
        top = scores.max(-1, keepdims=True)
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        out, lse = p / total @ v[:, :, None], top + np.log(total)
    return out.reshape(*q.shape[:3], v.shape[3]), lse.reshape(q.shape[:3])


def _attend_back(dout, q, k, v, out, lse, hidden, bias, scale):
    """(dq, dk, dv) from what forward left."""
    groups, keys, values = k.shape[1], k[:, :, None], v[:, :, None]
    with np.errstate(all="ignore"):
        p = np.exp(_scores(q, k, hidden, bias, scale) - _grouped(lse[..., None], groups))
        from_above = _grouped(dout, groups)
        delta = _grouped((dout * out).sum(-1, keepdims=True), groups)
        ds = p * (from_above @ values.swapaxes(-1, -2) - delta) * scale
        dq, dk = (ds @ keys).reshape(q.shape), (ds.swapaxes(-1, -2) @ _grouped(q, groups)).sum(2)
    return dq, dk, (p.swapaxes(-1, -2) @ from_above).sum(2)


def _in_order(x, order):
    return None if x is None else np.transpose(x, order)


# ---- what operators check --------------------------------------------------------------------------------------------


def _same(d, e):
    return d == e <= 256 and d % 8 == 0


def fa3_dims(d, e):
    return _same(d, e) or (128 < d <= 192 and 96 < e <= 128 and d % 8 == e % 8 == 0)


def fa4_dims(d, e):
    """Those of its tests: others compile, or do not."""
    return (d, e) in ((64, 64), (96, 96), (128, 128), (192, 128))


def _check_inputs(q, k, v, dims=_same):
    assert q.shape[-1] == k.shape[-1]
    assert dims(q.shape[-1], v.shape[-1])
    assert all(x.stride(-1) == 1 and x.numel() for x in (q, k, v))
    assert {x.dtype for x in (k, v)} == {q.dtype}


def _check_upstream(q, dout, out, lse, e=None):
    assert {dout.dtype, out.dtype} == {q.dtype}
    assert lse.dtype == torch.float32
    assert dout.shape == out.shape == (*q.shape[:-1], e or q.shape[-1])


def _check_bias(bias, q, k):
    assert bias is None or (bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(2) % 16 == 0)
    assert bias is None or bias.dtype == q.dtype


# ---- memory-efficient ------------------------------------------------------------------------------------------------
# aten: transformers/cuda/attention.cu, attention_backward.cu and mem_eff_attention/kernel_{forward,backward}.h.


def _top_left(q, k, causal):
    return np.triu(np.ones((q.shape[2], k.shape[2]), dtype=bool), 1) if causal else False


def _efficient_reads(q, k, v, bias):
    """q, k, v as (B, H, S, D) and the bias, as the kernel reads them: it is given (B, S, H, D) views."""
    _check_inputs(q, k, v)
    _check_bias(bias, q, k)
    assert q.shape[1] == k.shape[1], "no groups"
    three = [_rows_first(name, x, EFFICIENT["q"]) for name, x in (("q", q), ("k", k), ("v", v))]
    return *three, None if bias is None else read("bias", bias, EFFICIENT["bias"])


def _rows_first(name, x, reads):
    return _in_order(read(name, x.transpose(1, 2), reads), ROWS_FIRST)


def efficient(q, k, v, bias, causal, scale):
    """`_efficient_attention_forward`: out laid out as (B, S, H, D), lse rows rounded up to 32, +inf behind the last."""
    q64, k64, v64, bias64 = _efficient_reads(q, k, v, bias)
    out, lse = _attend(q64, k64, v64, _top_left(q, k, causal), bias64, scale)
    lse = np.pad(lse, ((0, 0), (0, 0), (0, -q.shape[2] % 32)), constant_values=np.inf)
    return written("out", out, q.dtype, ROWS_FIRST), written("lse", lse, torch.float32)


def efficient_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """`_efficient_attention_backward`: gradients laid out, and written, as (B, S, H, D)."""
    q64, k64, v64, bias64 = _efficient_reads(q, k, v, bias)
    _check_upstream(q, dout, out, lse)
    assert lse.shape[2] % 32 == 0
    assert lse.shape[2] - q.shape[2] < 32
    assert lse.stride(1) % 8 == lse.stride(0) % 8 == 0
    lse64 = read("lse", lse, EFFICIENT["lse"])
    assert (lse64[:, :, q.shape[2] :] == np.inf).all()
    out64 = _rows_first("out", out, EFFICIENT["out" if q.dtype in HALF else "out in float32"])
    dout64 = _rows_first("dout", dout, EFFICIENT["dout"])
    hidden = _top_left(q, k, causal)
    found = _attend_back(dout64, q64, k64, v64, out64, lse64[:, :, : q.shape[2]], hidden, bias64, scale)
    made = []
    for name, x in zip(("dq", "dk", "dv"), found, strict=True):
        _, heads, rows, dim = x.shape
        assumed = rows * heads * dim, dim, heads * dim, 1
        made.append(written(name, x, q.dtype, ROWS_FIRST, assumed))
    return tuple(made)


# ---- cuDNN -----------------------------------------------------------------------------------------------------------
# aten: cudnn/MHA.cpp, `run_cudnn_SDP_{f,b}prop` without TORCH_CUDNN_SDPA_AVOID_RECOMPILE. From cuDNN 9.19 to 9.25.0 one
# query is silently wrong on GPUs of 10.x before PyTorch 2.15, which refuses it (pytorch#193893).


def _cudnn_reads(q, k, v, bias):
    _check_inputs(q, k, v)
    _check_bias(bias, q, k)
    if k.shape[2] == 1:
        raise AddressError("cuDNN has no graph for one key")
    if q.shape[2] == 1:
        raise AddressError("cuDNN is wrong for one query, or PyTorch refuses it")
    three = [read(name, x, CUDNN["q"]) for name, x in (("q", q), ("k", k), ("v", v))]
    return *three, None if bias is None else read("bias", bias, CUDNN["bias"])


def cudnn(q, k, v, bias, causal, scale):
    """`_cudnn_attention_forward`: lse (B, H, S, 1)."""
    q64, k64, v64, bias64 = _cudnn_reads(q, k, v, bias)
    out, lse = _attend(q64, k64, v64, _top_left(q, k, causal), bias64, scale)
    return written("out", out, q.dtype, like_input(q)), written("lse", lse[..., None], torch.float32)


def cudnn_backward(dout, q, k, v, out, lse, bias, causal, scale):
    """`_cudnn_attention_backward`."""
    q64, k64, v64, bias64 = _cudnn_reads(q, k, v, bias)
    _check_upstream(q, dout, out, lse)
    assert lse.is_contiguous()
    assert dout.stride() == out.stride()
    dout64, out64, lse64 = (read(name, x, CUDNN[name]) for name, x in (("dout", dout), ("out", out), ("lse", lse)))
    found = _attend_back(dout64, q64, k64, v64, out64, lse64[..., 0], _top_left(q, k, causal), bias64, scale)
    return tuple(
        written(name, x, q.dtype, like_input(like))
        for name, x, like in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True)
    )


# ---- flash -----------------------------------------------------------------------------------------------------------


def fa2_window(window, longest):
    """The window that FA2's kernels are given: its host code closes the open side of a window at `max_k` keys, which
    hides keys or shows others where a slice has more rows than keys.

    aten: flash_api.cpp, `mha_{,varlen_}{fwd,bwd}` and `set_params_fprop`, as in FlashAttention 2.8.3.
    """
    max_k = longest[1]
    left, right = (-1 if bound >= max_k else bound for bound in window)
    if (left, right) == (-1, 0):  # `is_causal`: these kernels have no left side
        return left, right
    if left < 0 <= right:
        left = max_k
    if right < 0 <= left:
        right = max_k
    return left, right


def fa3_window(window, longest):
    """The window that FA3's kernels are given, closed where no slice ends.

    FlashAttention: hopper/flash_api.cpp, `mha_fwd`, `mha_bwd` and `set_params_fprop`, called as by PyTorch's
    torch/nn/attention/_fa3.py, the same from 2.12 to 2.15.
    """
    max_q, max_k = longest
    left, right = window
    left, right = -1 if left >= max_k - 1 else left, -1 if right >= max_q - 1 else right
    if (left, right) in ((-1, 0), (-1, -1)):
        return left, right
    return max_k - 1 if left < 0 else left, max_q - 1 if right < 0 else right


def fa4_window(window, longest):
    """The window that FA4's kernels are given: an open side is None, and is not compared with.

    flash_attn/cute/{interface,mask,block_info}.py of flash-attn-4 4.0.0b5 to b36, called as by PyTorch's
    torch/nn/attention/_fa4.py.
    """
    return window


def window_mask(rows, cols, window):
    """(rows, cols) bool: what a window (left, right) beside a diagonal that ends bottom-right shows; -1 is open.

    FlashAttention: csrc/flash_attn/src/mask.h, hopper/mask.h, flash_attn/cute/mask.py.
    """
    left, right = window
    diagonal = np.arange(rows)[:, None] + (cols - rows)
    j = np.arange(cols)
    mask = np.ones((rows, cols), dtype=bool)
    if left >= 0:
        mask &= j >= diagonal - left
    if right >= 0:
        mask &= j <= diagonal + right
    return mask


def _slices(q, k, starts_q, starts_k, longest):
    """Query rows and key rows of each slice of a packed call."""
    for starts, x, most in ((starts_q, q, longest[0]), (starts_k, k, longest[1])):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert (starts[0], starts[-1]) == (0, x.shape[0])
        assert int(starts.diff().max()) == most
        assert int(starts.diff().min()) > 0
    edges = pairwise(starts_q.tolist()), pairwise(starts_k.tolist())
    return [(slice(*rows), slice(*cols)) for rows, cols in zip(*edges, strict=True)]


def _heads_first(x_THD):
    return x_THD.swapaxes(0, 1)[None]


@dataclass(frozen=True)
class Version:
    """What a version of flash attention makes of its arguments."""

    dims: Callable
    window: Callable
    copies: bool = False
    """Whether dout and out are made contiguous first (aten: attention_backward.cu)."""


FA2 = Version(_same, fa2_window, copies=True)
FA3 = Version(fa3_dims, fa3_window)
FA4 = Version(fa4_dims, fa4_window)


def flash(q, k, v, starts_q, starts_k, longest, window, scale, version=FA2):
    """`_flash_attention_forward`, of (B, S, H, D) without `starts`, of packed (T, H, D) with them."""
    _check_inputs(q, k, v, version.dims)
    order, window = like_input(q), version.window(window, longest)
    if starts_q is None:
        assert longest == (q.shape[1], k.shape[1])
        q64, k64, v64 = (_in_order(read(n, x, FLASH["q"]), ROWS_FIRST) for n, x in (("q", q), ("k", k), ("v", v)))
        out, lse = _attend(q64, k64, v64, ~window_mask(q.shape[1], k.shape[1], window), None, scale)
        made = written("out", _in_order(out, ROWS_FIRST), q.dtype, order)
        return made, written("lse", lse, torch.float32)
    q64, k64, v64 = (read(n, x, VARLEN["q"]) for n, x in (("q", q), ("k", k), ("v", v)))
    out, lse = np.full((*q.shape[:2], v.shape[2]), np.nan), np.full((q.shape[1], q.shape[0]), np.nan)
    for rows, cols in _slices(q, k, starts_q, starts_k, longest):
        three = (_heads_first(x) for x in (q64[rows], k64[cols], v64[cols]))
        hidden = ~window_mask(rows.stop - rows.start, cols.stop - cols.start, window)
        part, part_lse = _attend(*three, hidden, None, scale)
        out[rows], lse[:, rows] = part[0].swapaxes(0, 1), part_lse[0]
    return written("out", out, q.dtype, order), written("lse", lse, torch.float32)


def flash_backward(dout, q, k, v, out, lse, starts_q, starts_k, longest, window, scale, version=FA2):
    """`_flash_attention_backward`, layouts as in `flash`."""
    _check_inputs(q, k, v, version.dims)
    _check_upstream(q, dout, out, lse, v.shape[-1])
    tables = (FLASH, VARLEN) if version.copies else (BY_STRIDES, VARLEN_BY_STRIDES)
    table, window = tables[starts_q is not None], version.window(window, longest)
    operands = (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse))
    read64 = [read(name, x, table.get(name, table["q"])) for name, x in operands]
    if starts_q is None:
        *five, lse64 = read64
        five = (_in_order(x, ROWS_FIRST) for x in five)
        hidden = ~window_mask(q.shape[1], k.shape[1], window)
        found = [_in_order(x, ROWS_FIRST) for x in _attend_back(*five, lse64, hidden, None, scale)]
    else:
        found = [np.full(x.shape, np.nan) for x in (q, k, v)]
        dout64, q64, k64, v64, out64, lse64 = read64
        for rows, cols in _slices(q, k, starts_q, starts_k, longest):
            five = (_heads_first(x) for x in (dout64[rows], q64[rows], k64[cols], v64[cols], out64[rows]))
            hidden = ~window_mask(rows.stop - rows.start, cols.stop - cols.start, window)
            parts = _attend_back(*five, lse64[:, rows][None], hidden, None, scale)
            for total, part, at in zip(found, parts, (rows, cols, cols), strict=True):
                total[at] = part[0].swapaxes(0, 1)
    return tuple(
        written(name, x, q.dtype, like_input(like))
        for name, x, like in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True)
    )


# ---- cuDNN over packed slices ----------------------------------------------------------------------------------------
# aten: cudnn/MHA.cpp, `run_cudnn_SDP_{f,b}prop_nestedtensor`, and what torch/nn/attention/varlen.py of 2.14 and 2.15
# leaves to cuDNN. Causal is from the top-left corner without `seqused_k`; groups of heads are taken from 2.15 on.


def _check_packed(q, k, v, starts_q, starts_k, longest, window, more=()):
    _check_inputs(q, k, v)
    assert q.shape[-1] <= 128
    assert k.shape[1] == v.shape[1]
    assert longest[0] > CUDNN_ROWS
    assert window in ((-1, -1), (-1, 0))
    for x in (q, k, v, *more):
        if not x.is_contiguous() or x.storage_offset() * x.element_size() % 16:
            raise AddressError(f"{tuple(x.shape)} by {x.stride()} from {x.storage_offset()} is not packed")
    if max(x.shape[0] * x.stride(0) for x in (q, k, v)) >= 1 << 31:
        raise AddressError("offsets do not fit in 32 bits")


def cudnn_packed(q, k, v, starts_q, starts_k, longest, window, scale):
    """`_cudnn_attention_forward` with starts."""
    _check_packed(q, k, v, starts_q, starts_k, longest, window)
    q64, k64, v64 = (read(n, x, PACKED) for n, x in (("q", q), ("k", k), ("v", v)))
    out, lse = np.full(q.shape, np.nan), np.full((q.shape[1], q.shape[0]), np.nan)
    for rows, cols in _slices(q, k, starts_q, starts_k, longest):
        hidden = _top_left_hidden(rows, cols, window)
        part, part_lse = _attend(*(_heads_first(x) for x in (q64[rows], k64[cols], v64[cols])), hidden, None, scale)
        out[rows], lse[:, rows] = part[0].swapaxes(0, 1), part_lse[0]
    return written("out", out, q.dtype), written("lse", lse, torch.float32)


def cudnn_packed_backward(dout, q, k, v, out, lse, starts_q, starts_k, longest, window, scale):
    """`_cudnn_attention_backward` with starts."""
    _check_packed(q, k, v, starts_q, starts_k, longest, window, (dout, out))
    _check_upstream(q, dout, out, lse)
    assert lse.shape == (q.shape[1], q.shape[0])
    operands = (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out))
    dout64, q64, k64, v64, out64 = (read(name, x, PACKED) for name, x in operands)
    lse64 = read("lse", lse, Reads("dd", vectors=False))
    found = [np.full(x.shape, np.nan) for x in (q, k, v)]
    for rows, cols in _slices(q, k, starts_q, starts_k, longest):
        five = (_heads_first(x) for x in (dout64[rows], q64[rows], k64[cols], v64[cols], out64[rows]))
        parts = _attend_back(*five, lse64[:, rows][None], _top_left_hidden(rows, cols, window), None, scale)
        for total, part, at in zip(found, parts, (rows, cols, cols), strict=True):
            total[at] = part[0].swapaxes(0, 1)
    return tuple(written(name, x, q.dtype) for name, x in zip(("dq", "dk", "dv"), found, strict=True))


def _top_left_hidden(rows, cols, window):
    shape = rows.stop - rows.start, cols.stop - cols.start
    return np.triu(np.ones(shape, dtype=bool), 1) if window == (-1, 0) else np.zeros(shape, dtype=bool)
