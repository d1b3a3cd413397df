"""Every private torch name Longspan uses, each behind a small typed function. Nothing else in the package has one.

Shapes: B batch, H query heads, G key/value heads, Q query rows, K key rows, T rows of many slices packed one after
another, D head dim. Dropout is always off, so the random states that the GPU operators carry are placeholders.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

_aten = torch.ops.aten


def cpu_flash(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the CPU flash operator; causal is top-left aligned.

    Traps, all silent: an empty input kills the process; a last dim that is not contiguous, or a bias of another dtype
    with float64, gives wrong numbers; a row that sees nothing gets lse 0.0.
    """
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHQD, k_BGKD, v_BGKD, 0.0, causal, attn_mask=bias, scale=scale
    )


def cpu_flash_backward(
    dout_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the CPU flash operator, dk and dv with the key/value heads.

    A bool bias is taken without complaint and gives wrong gradients.
    """
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_BHQD, q_BHQD, k_BGKD, v_BGKD, out_BHQD, lse_BHQ, 0.0, causal, attn_mask=bias, scale=scale
    )


def _no_random(like: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset for operators that want them although dropout is off."""
    zero = torch.zeros((), dtype=torch.int64, device=like.device)
    return zero, zero


def efficient(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKE: Tensor,
    bias_BHQK: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of memory-efficient attention; causal is top-left aligned, lse rows are rounded up to 32."""
    found = _aten._scaled_dot_product_efficient_attention(
        q_BHQD, k_BHKD, v_BHKE, bias_BHQK, True, 0.0, causal, scale=scale
    )
    return found[0], found[1]


def efficient_backward(
    dout_BHQE: Tensor,
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKE: Tensor,
    out_BHQE: Tensor,
    lse_BHR: Tensor,
    bias_BHQK: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of memory-efficient attention; R is Q rounded up to 32."""
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout_BHQE,
        q_BHQD,
        k_BHKD,
        v_BHKE,
        bias_BHQK,
        out_BHQE,
        lse_BHR,
        *_no_random(q_BHQD),
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


def cudnn(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    bias_BHQK: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse_BHQ1) of cuDNN attention; causal is top-left aligned."""
    found = _aten._scaled_dot_product_cudnn_attention(
        q_BHQD, k_BGKD, v_BGKE, bias_BHQK, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def cudnn_backward(
    dout_BHQE: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHQE: Tensor,
    lse_BHQ1: Tensor,
    bias_BHQK: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of cuDNN attention."""
    return _aten._scaled_dot_product_cudnn_attention_backward(
        dout_BHQE,
        q_BHQD,
        k_BGKD,
        v_BGKE,
        out_BHQE,
        lse_BHQ1,
        *_no_random(q_BHQD),
        bias_BHQK,
        None,
        None,
        q_BHQD.shape[2],
        k_BGKD.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest: tuple[int, int],
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of CUDA flash attention.

    Dense without `starts`: (B, Q, H, D) in, lse (B, H, Q). With `starts` (int32, one more than there are slices): the
    packed rows of many slices, (T, H, D) in, lse (H, T). `window` = (left, right) keys beside the diagonal, which ends
    in the bottom-right corner; -1 is open.
    """
    found = _aten._flash_attention_forward(
        q,
        k,
        v,
        starts_q,
        starts_k,
        *longest,
        0.0,
        window == (-1, 0),
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return found[0], found[1]


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest: tuple[int, int],
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of CUDA flash attention, layouts as in `flash`."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    return _aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        starts_q,
        starts_k,
        *longest,
        0.0,
        window == (-1, 0),
        state,
        unused,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )


def group_named(name: str) -> ProcessGroup:
    """The process group that PyTorch registered under a name; operators can carry names, not groups."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
