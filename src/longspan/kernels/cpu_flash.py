"""`cpu_flash`: PyTorch's fused attention on CPUs. Shapes: see contract.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan import _torch
from longspan.kernels.panels import BackwardOp, ForwardOp, PanelKernel
from longspan.tile import MASKS, Features, as_dtype

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

SHORT = 768
"""Query rows below which backward of bfloat16 is faster, and more exact, in float32, conversion included: 10x at 16
rows, 3x at 128, 1.1x at 700 (H=8, D=64, causal), 0.8x at 1024. The operator takes larger blocks from 768 rows on. Head
dims above 64 gain only in tiles of less than SHORT_WIDE rows and keys. Of float16 all gain, 1.2x still at 2048. That is
on CPUs with instructions for bfloat16; without them float32 is 2.2 to 2.8x faster from 512 to 4096 rows as well
(`python -m benchmarks.bfloat16`)."""
SHORT_WIDE = (192, 512)
HUGE = 8192.0
"""Above this lse, backward of bfloat16 stays in bfloat16: float32 sums a product in another order than forward did,
and rounding a score of 1e5 by 0.01 changes its probability by 1%."""


def forward_op(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one piece."""
    return _torch.cpu_flash(q_BHQD, k_BGKD, v_BGKD, 0.0, causal, attn_mask=bias, scale=scale)


def _is_faster_in_float32(q_BHQD: Tensor, k_BGKD: Tensor, lse_BHQ: Tensor) -> bool:
    """Return whether backward should run in float32: see SHORT, and HUGE for scores that forbid it."""
    if q_BHQD.dtype != torch.bfloat16:
        return q_BHQD.dtype == torch.float16
    rows, cols = q_BHQD.shape[2], k_BGKD.shape[2]
    is_short = rows < SHORT if q_BHQD.shape[3] <= 64 else rows < SHORT_WIDE[0] and cols < SHORT_WIDE[1]
    if not is_short and _torch.cpu_has_bfloat16():
        return False
    if not lse_BHQ.numel():
        return True
    low, high = (float(bound) for bound in lse_BHQ.aminmax())
    if high == torch.inf:  # a row that saw nothing
        high = float(lse_BHQ.masked_fill(lse_BHQ == torch.inf, 0.0).amax())
    return max(-low, high) <= HUGE


def backward_op(
    dout_BHQD: Tensor, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, out_BHQD: Tensor, lse_BHQ: Tensor,
    bias: Tensor | None, causal: bool, scale: float, /,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of one piece, in the inputs' dtype or float32, whichever is faster."""
    dtype, inputs = q_BHQD.dtype, (q_BHQD, k_BGKD, v_BGKD)
    if _is_faster_in_float32(q_BHQD, k_BGKD, lse_BHQ):
        dtype, inputs = torch.float32, (q_BHQD.float(), k_BGKD.float(), v_BGKD.float())
        bias = None if bias is None else bias.float()
    dout_BHQD, out_BHQD = as_dtype(dout_BHQD, dtype), as_dtype(out_BHQD, dtype)
    return _torch.cpu_flash_backward(dout_BHQD, *inputs, out_BHQD, lse_BHQ, bias, causal, scale)


@dataclass(frozen=True)
class CpuFlash(PanelKernel):
    """The CPU flash operator, tile by tile; any head dims, grouped heads, strided rows."""

    name: str = "cpu_flash"
    op: ForwardOp = forward_op
    backward_op: BackwardOp = backward_op
    honours: Features = MASKS

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        if q_BHQD.device.type != "cpu":
            return f"it runs on CPUs, and the tensors are on {q_BHQD.device}"
        if q_BHQD.dtype not in DTYPES:
            return f"it takes float64, float32, bfloat16 and float16, and the tensors are {q_BHQD.dtype}"
        return None
