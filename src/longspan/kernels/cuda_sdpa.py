"""`efficient` and `cudnn`: PyTorch's fused GPU operators without bands, called part by part. Not run on a GPU.

No GPU was available: calls are checked with fake `cuda` tensors (signatures, shapes, dtypes), semantics and memory
layouts with models that read by address. Shapes: see contract.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan import _torch
from longspan.kernels.contract import AMPERE, gpu_refusal
from longspan.kernels.panels import BackwardOp, ForwardOp, PanelKernel, additive
from longspan.tile import MASKS, Features

MULTIPLE = 8  # head dims that every one of these operators reads in whole vectors
OLDEST = (5, 0)  # GPUs that memory-efficient attention runs on
LSE_MULTIPLE = 32  # memory-efficient attention keeps whole warps of lse rows


@dataclass(frozen=True)
class Efficient(PanelKernel):
    """Memory-efficient attention: float32 too. Not run on a GPU."""

    name: str = "efficient"
    op: ForwardOp = _torch.efficient
    backward_op: BackwardOp = _torch.efficient_backward
    honours: Features = MASKS
    multiple: int = MULTIPLE

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        least = AMPERE if q_BHQD.dtype == torch.bfloat16 else OLDEST
        return _refuses(q_BHQD, (torch.float32, torch.bfloat16, torch.float16), least)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, /
    ) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        out, lse_BHR = self.op(
            q, _repeat_heads(k, heads), _repeat_heads(v, heads), _expand_bias(bias, q), causal, scale
        )
        return out, lse_BHR.narrow(2, 0, q.shape[2])

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
        causal: bool, scale: float, /,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        heads, groups, rows = q.shape[1], k.shape[1], q.shape[2]
        room = -rows % LSE_MULTIPLE
        lse_BHR = torch.nn.functional.pad(lse, (0, room), value=torch.inf).contiguous()
        k, v, out = _repeat_heads(k, heads), _repeat_heads(v, heads), _rows_first(out.to(q.dtype))
        dq, dk, dv = self.backward_op(dout.to(q.dtype), q, k, v, out, lse_BHR, _expand_bias(bias, q), causal, scale)
        return dq, _sum_repeated_heads(dk, groups), _sum_repeated_heads(dv, groups)


@dataclass(frozen=True)
class Cudnn(PanelKernel):
    """cuDNN attention. Not run on a GPU."""

    name: str = "cudnn"
    op: ForwardOp = _torch.cudnn
    backward_op: BackwardOp = _torch.cudnn_backward
    honours: Features = MASKS
    multiple: int = MULTIPLE

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        widest = max(q_BHQD.shape[3], v_BGKE.shape[3])
        if widest > 128:
            return f"it takes head dims up to 128 on every GPU that has it, and one here is {widest}"
        return _refuses(q_BHQD, (torch.bfloat16, torch.float16), AMPERE)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, /
    ) -> tuple[Tensor, Tensor]:
        rows = q.shape[2]
        if rows == 1:
            (q,), bias = _with_second_row((q,), bias)
        if k.shape[2] == 1:
            k, v, bias, causal = *_with_hidden_key(q, k, v, bias), False
        out, lse_BHQ1 = self.op(q, k, v, _expand_bias(bias, q), causal, scale)
        return out.narrow(2, 0, rows), lse_BHQ1.squeeze(3).narrow(2, 0, rows)

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
        causal: bool, scale: float, /,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # cuDNN takes lse for densely packed whatever its strides are, and gradients are silently wrong. It finds
        # the plan of an earlier call by q, k, v and bias: dout and out must always have the same layout.
        lse, dout, out = _dense(lse).unsqueeze(3), _dense(dout.to(q.dtype)), _dense(out.to(q.dtype))
        rows, keys = q.shape[2], k.shape[2]
        if rows == 1:
            (dout, q, out, lse), bias = _with_second_row((dout, q, out, lse), bias)
        if keys == 1:
            k, v, bias, causal = *_with_hidden_key(q, k, v, bias), False
        dq, dk, dv = self.backward_op(dout, q, k, v, out, lse, _expand_bias(bias, q), causal, scale)
        return dq.narrow(2, 0, rows), dk.narrow(2, 0, keys), dv.narrow(2, 0, keys)


def _refuses(q: Tensor, dtypes: tuple[torch.dtype, ...], least: tuple[int, int]) -> str | None:
    if (why := gpu_refusal(q, least)) is not None:
        return why
    if q.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return f"it takes {' and '.join(names)}, and the tensors are {q.dtype}"
    return None


def _dense(x: Tensor) -> Tensor:
    """Return x contiguous, with strides given by its shape alone: contiguous tensors may have any in dims of size 1."""
    return x.contiguous().view(-1).view(x.shape)


def _with_second_row(operands: tuple[Tensor, ...], bias: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """Append a row of zeros, which has no gradients, to one query and its results: cuDNN 9.19 to 9.25.0 is silently
    wrong for one query on GPUs of 10.x, and newer versions of PyTorch refuse it (pytorch#193893)."""
    rows = [torch.nn.functional.pad(x, (0, 0, 0, 1)).contiguous() for x in operands]
    return rows, None if bias is None else additive(2, bias.shape[1], None, None, like=bias).copy_(bias)


def _with_hidden_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Append a row of zeros, hidden by the bias, to one key and its value: cuDNN takes no single key."""
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)).contiguous() for x in (k, v))
    both = additive(q.shape[2], 2, None, None, like=q)
    both.select(1, 1).fill_(-torch.inf)
    return k, v, both if bias is None else both.add_(bias)


def _rows_first(x_BHQE: Tensor) -> Tensor:
    """Return x with the memory layout (B, Q, H, E).

    In half precision, memory-efficient backward assumes that rows of `out` are H * E apart, whatever its strides, and
    does not copy it as it does `dout`: in another layout dq and dk would be computed from other rows and heads.
    """
    return x_BHQE.transpose(1, 2).contiguous().transpose(1, 2)


def _expand_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], *bias.shape)


def _repeat_heads(x_BGKD: Tensor, heads: int) -> Tensor:
    """Copy each key/value head for every query head: the operator has no groups."""
    b, groups, rows, dim = x_BGKD.shape
    if groups == heads:
        return x_BGKD
    return x_BGKD.unsqueeze(2).expand(b, groups, heads // groups, rows, dim).reshape(b, heads, rows, dim)


def _sum_repeated_heads(dx_BHKD: Tensor, groups: int) -> Tensor:
    """Sum the gradients of the copies, in float32."""
    if dx_BHKD.shape[1] == groups:
        return dx_BHKD
    return dx_BHKD.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32)
