"""Small random problems for the exactness tests, and how exact an answer must be.

A case is a mask, a layout, sizes, a scheme and inputs, all drawn from a seed. Answers are five tensors: out, lse, dq,
dk, dv. Errors are Frobenius norms of the difference to a dense float64 oracle.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning import Problem, Sizes, scheme
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan
from longspan.planning.steps import ITEMSIZE
from longspan.testing import allowed, dense_gradients
from tests.cases import LAYOUTS, MASKS, random_layout, random_mask

KINDS = tuple(kind for kind in MASKS if kind not in ("opaque", "empty"))  # execution refuses masks that are functions
LONGEST = {
    1: 96,
    2: 96,
    3: 80,
    4: 64,
    5: 48,
    8: 40,
}  # tokens, by world size: many small cases find more than few large ones
WORLDS, SHARES = tuple(LONGEST), (0.12, 0.22, 0.22, 0.2, 0.14, 0.1)
MANY = 16  # spans in a layout; nine in ten of those with more, whose time goes into bookkeeping, become contiguous
SCHEMES = ("ring", "exchange", "all_gather", "all_to_all", "hybrid", "hybrid_exchange", "hybrid_all_gather")
SCHEMES += ("staged", "hybrid_staged")
NAMES = ("out", "lse", "dq", "dk", "dv")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One problem. It is run in several dtypes by several kernels, from one plan."""

    seed: int
    kind: str
    mask: Mask
    layout: Layout
    sizes: Sizes
    scheme: str
    node: int | None
    max_rows: int | None
    keep: bool

    @property
    def scale(self) -> float:
        return self.sizes.head_dim**-0.5 * (1 + self.seed % 3)

    @cached_property
    def _plan(self) -> Plan:
        problem = Problem.make(self.mask, self.layout, self.sizes, node=self.node, max_rows=self.max_rows)
        return Plan(self.mask, self.layout, self.sizes, "float64", scheme(self.scheme, problem), CPU, True, self.keep)

    def plan(self, dtype: str) -> Plan:
        """The plan for a dtype. Who computes what does not depend on it, so steps are planned once."""
        made = anew(self._plan, sizes=replace(self.sizes, itemsize=ITEMSIZE[dtype]), dtype=dtype)
        made._steps.update({rank: self._plan._rank(rank) for rank in range(self.layout.world_size)})
        return made

    def inputs(self, *, narrow: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the output's gradient, float64; bfloat16 and float16 (narrow), or else float32, hold them."""
        s, draw = self.sizes, torch.Generator().manual_seed(self.seed)
        heads, dims = (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads), (s.head_dim, s.head_dim, *[s.v_head_dim] * 2)
        shapes = [(s.batch, h, self.layout.seq_len, d) for h, d in zip(heads, dims, strict=True)]
        tensors = [torch.randn(shape, generator=draw) for shape in shapes]
        if narrow:
            tensors = [t.bfloat16().half() for t in tensors]
        q, k, v, dout = (t.double() for t in tensors)
        return q, k, v, dout

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.scheme} of {self.kind} {self.mask} over {self.layout}, node {self.node},"
            f" max_rows {self.max_rows}, keep {self.keep}, {self.sizes}"
        )


def exact_case(seed: int) -> Case:
    """The case of a seed; every kind of mask, layout, scheme and world size comes up with every other."""
    rng = np.random.default_rng(seed)
    kind = "empty" if seed % 40 == 39 else KINDS[seed % len(KINDS)]
    world = int(rng.choice(WORLDS, p=SHARES))
    total = int(rng.integers(1, 10)) if rng.random() < 0.2 else int(rng.integers(10, LONGEST[world] + 1))
    kv_heads = int(rng.choice([1, 2, 3]))
    head_dim = int(rng.integers(3, 25))
    v_head_dim = head_dim if rng.random() < 0.5 else int(rng.integers(3, 25))
    sizes = Sizes(kv_heads * int(rng.choice([1, 2])), kv_heads, head_dim, v_head_dim, 8, int(rng.integers(1, 3)))
    mask = random_mask(rng, kind, total, sizes)
    layout = random_layout(rng, str(rng.choice(LAYOUTS)), mask, total, world)
    if len(layout.table) > MANY and rng.random() < 0.9:
        layout = random_layout(rng, "contiguous", mask, total, world)
    return Case(
        seed,
        kind,
        mask,
        layout,
        sizes,
        _scheme(str(rng.choice(SCHEMES)), int(rng.choice(_divisors(world)))),
        int(rng.choice(_divisors(world))) if rng.random() < 0.4 else None,
        int(rng.integers(10, 60)) if rng.random() < 0.2 else None,
        bool(rng.random() < 0.3),
    )


def _divisors(world):
    return [d for d in range(1, world + 1) if world % d == 0]


def _scheme(name, heads):
    kind, _, inner = name.partition("_")
    if kind != "hybrid":
        return name
    return f"hybrid({heads},{inner})" if inner else f"hybrid({heads})"


# -- how exact an answer must be ---------------------------------------------------------------------------------------

Five = tuple[Tensor, ...]


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def fused(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float) -> Five:
    """PyTorch's fused attention on one device with a dense additive mask, forward and backward.

    It takes equal head dims only, so the smaller one is padded with zeros; without that PyTorch would quietly use a
    plain implementation in float32, which is another thing. The public function keeps lse to itself.
    """
    d, e = q.shape[3], v.shape[3]
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    q, k, v, dout = (functional.pad(t, (0, max(d, e) - t.shape[3])) for t in (q, k, v, dout))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = functional.scaled_dot_product_attention(*leaves, attn_mask=bias, scale=scale, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, lse = operator(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    lse = lse.masked_fill(~seen.any(-1), -torch.inf)  # it returns 0 for rows that see nothing
    return out.detach()[..., :e], lse, dq[..., :d], dk[..., :d], dv[..., :e]


@dataclass(frozen=True)
class Oracle:
    """The float64 answer, and what every implementation must be allowed to get wrong of each of the five.

    A gradient can be 0 by cancellation (a row that sees one key), and then no relative error means anything. What
    counts is what is summed: p * v in out, p * (dout . v - delta) * k in dq, and so on; the errors of the summands are
    independent, so their squares add up. `sizes` is the effect of a relative error of 1 in every summand; `weights`
    that of a relative error of 1 in every score, which exp() turns into one of p that is larger by the score.
    """

    answer: Five
    sizes: tuple[float, ...]
    weights: tuple[float, ...]
    largest: float
    """The largest score, positive or negative."""
    seen: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float) -> "Oracle":
        seen = allowed(mask, q.shape[0], q.shape[1], q.shape[2])
        out, lse, dq, dk, dv = dense_gradients(q, k, v, mask, scale, dout)
        q, k, v, dout = (t.double() for t in (q, k, v, dout))
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        lse_BHS1 = lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)
        logits = scale * q @ k.mT
        p = torch.exp(logits.masked_fill(~seen, -torch.inf) - lse_BHS1)
        scores = scale * (q.square() @ k.square().mT).sqrt() * seen
        dp, delta = dout.square() @ v.square().mT, (dout * out).square().sum(-1, keepdim=True)

        def norms(p: Tensor) -> tuple[float, ...]:
            ds = scale**2 * p.square() * (dp + delta)
            by_keys = torch.cat((ds.mT @ q.square(), p.square().mT @ dout.square()), dim=-1)
            by_keys = by_keys.unflatten(1, (-1, group)).sum(2).split((q.shape[3], v.shape[3]), dim=-1)
            terms = (p.square() @ v.square(), ds @ k.square(), *by_keys)
            return tuple(float(t.sum().sqrt()) for t in terms)

        (s_out, *s_grads), (w_out, *w_grads) = norms(p), norms(p * scores)
        sizes, weights = (s_out, 0.0, *s_grads), (w_out, float(lse_BHS1.norm() + (p * scores).norm()), *w_grads)
        largest = float((logits * seen).abs().max())
        return Oracle((out, lse, dq, dk, dv), sizes, weights, largest, seen)

    def errors(self, found: Five) -> tuple[float, ...]:
        """The error of each of the five; rows that see nothing must be (0, -inf) exactly."""
        nothing = ~self.seen.any(-1)
        assert torch.equal(found[1].isneginf(), nothing), "lse is -inf where, and only where, a row sees nothing"
        assert not found[0][nothing].any(), "a row that sees nothing has an output"
        assert not found[2][nothing].any(), "a row that sees nothing has a gradient"
        pairs = zip(found, self.answer, strict=True)
        return tuple(float((f.double() - a).masked_fill(a.isneginf(), 0.0).norm()) for f, a in pairs)

    def relative(self, found: Five) -> tuple[float, ...]:
        """Errors over the norm of the answer, or over a hundredth per number where that is more."""
        norms = [max(float(a[a.isfinite()].norm()), 1e-2 * max(a.numel(), 1) ** 0.5) for a in self.answer]
        return tuple(error / norm for error, norm in zip(self.errors(found), norms, strict=True))

    def roundings(self, dtype: torch.dtype) -> tuple[float, ...]:
        """The effect of rounding everything that is summed to `dtype` once, and scores (lse) to float32."""
        narrow, wide = unit(dtype), unit(torch.float64 if dtype == torch.float64 else torch.float32)
        return tuple(narrow * size + wide * weight for size, weight in zip(self.sizes, self.weights, strict=True))


def assert_exact(oracle: Oracle, found: Five, baseline: tuple[float, ...] | None, what: object) -> None:
    """float64: relative errors of 1e-12. Narrower: at most twice the errors of the fused kernel.

    One rounding of every summand is the floor, and a little more where rows are so few that chance does not average
    out: below it, one of two right answers is nearer by luck.
    """
    for name, tensor in zip(NAMES, found, strict=True):
        assert tensor.isfinite().all() or name == "lse", f"{name} is not finite: {what}"
    if baseline is None:
        errors, limits = oracle.relative(found), [1e-12] * 5
    else:
        floors = np.array(oracle.roundings(found[0].dtype)) * (1 + 2 / max(found[1].numel(), 1) ** 0.5)
        errors, limits = oracle.errors(found), 2 * np.array(baseline) + floors
    for name, error, limit in zip(NAMES, errors, limits, strict=True):
        assert error <= limit, f"{name} is off by {error:.3e}, the limit is {limit:.3e}: {what}"


def anew(plan, **changes):
    """The same plan with nothing remembered about it: of what one run remembered, mutants of the code see nothing."""
    return Plan(*(changes.get(name, getattr(plan, name)) for name in Plan.__match_args__))
