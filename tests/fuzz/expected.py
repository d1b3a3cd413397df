"""The truth of a call, and how far from it an answer may be."""

import torch

from .calls import draw_tensors
from .cases import Call, Case
from .oracle import attend, cut, dense_mask, plain_scale

FACTOR = 4.0  # times the error of plain PyTorch in the same dtype
FEW = 16.0  # roundings of float32 or wider, in which sums and scores are kept
FAST = 2e-4  # PyTorch's fused CPU kernel takes an exponential that is good to 6e-5 for 16 bits
ROUND = 4.0  # roundings of the dtype: probabilities and answers may be rounded to it


def grads_of(call: Call, case: Case, dtype, drawn):
    """(out, lse, gradients by name) of the dense computation in a dtype; whole tensors."""
    leaves, extras, upstream = drawn
    leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in leaves.items()}
    extras = {name: x.to(dtype, copy=True).requires_grad_() for name, x in extras.items()}
    out, lse = attend(call, leaves, extras, dense_mask(call))
    names = [*leaves, *extras]
    parts = losses(call, case, out, lse, upstream["out"], upstream["lse"])
    found = torch.autograd.grad(sum(parts), [*leaves.values(), *extras.values()], allow_unused=True)
    grads = {n: torch.zeros_like((leaves | extras)[n]) if g is None else g for n, g in zip(names, found, strict=True)}
    return out.detach().double(), lse.detach().double(), {name: g.double() for name, g in grads.items()}


def losses(call: Call, case: Case, out, lse, for_out, for_lse):
    """One or two losses of a call: random weights of out and, if asked for, of lse."""
    of_out = (out.double() * for_out).sum()
    of_lse = (lse.double().masked_fill(lse.isneginf(), 0.0) * for_lse).sum() if call.lse else None
    if case.losses == "two":
        return [of_out, 0.5 * of_out if of_lse is None else of_lse]
    return [of_out if of_lse is None else of_out + of_lse]


def largest(x) -> float:
    """The largest finite magnitude."""
    x = x.detach().double().abs()
    return float(torch.where(x.isfinite(), x, 0.0).max()) if x.numel() else 0.0


class Expected:
    """What must come out of a call: out, lse and gradients by name, whole and in float64, and a limit for each.

    A limit is a few times the error that plain PyTorch makes in the same dtype, plus a few roundings of the largest
    numbers on the way: tensors of few elements may be right by luck in one computation and not in the other.
    """

    def __init__(self, case: Case, call: Call):
        self.drawn = draw_tensors(call)
        self.out, self.lse, self.grads = grads_of(call, case, torch.float64, self.drawn)
        dtype = getattr(torch, call.dtype)
        rough = (self.out, self.lse, self.grads)
        if call.dtype != "float64":
            rough = grads_of(call, case, dtype, self.drawn)
        score, value, grad = self._sizes(call)
        inside = torch.finfo(dtype if call.dtype == "float64" else torch.float32).eps * FEW * (1 + score)
        natural = inside + ROUND * torch.finfo(dtype).eps
        self.limits = {"out": natural * value + FACTOR * largest(rough[0] - self.out), "lse": inside}
        if call.dtype in ("bfloat16", "float16"):
            self.limits["lse"] += FAST
        if self.drawn[1]:  # tensors beside q, k and v may be used in their own dtype
            self.limits["lse"] += FACTOR * largest(rough[1] - self.lse)
        for name, truth in self.grads.items():
            self.limits[name] = natural * grad + FACTOR * largest(rough[2][name] - truth)

    def _sizes(self, call: Call):
        """The largest score, the largest value, and the largest term of a gradient before anything cancels."""
        leaves, _, upstream = self.drawn
        q, k, v = cut(call, leaves)
        repeat = call.q_heads // call.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scale = abs(plain_scale(call))
        score = max(scale * largest(q @ k.transpose(-1, -2)), largest(self.lse))
        value = max(1.0, largest(v))
        grad = largest(upstream["out"] @ v.transpose(-1, -2)) + largest(upstream["lse"]) + largest(upstream["out"])
        by = max(1.0, scale * largest(q), scale * largest(k), score if call.score else 1.0)
        return score, value, grad * by
