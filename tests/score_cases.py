"""Score functions, masks and a dense oracle for the tests of scores.

The oracle is written from the maths: every pair of (B, H, S, S) scores, score functions called for one pair at a time
(four nested `torch.vmap`, as FlexAttention does), autograd for all gradients. It shares no code with longspan, and
takes its mask and its dropout pattern as boolean tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import longspan as ls
from longspan import masks
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.scoring.biases import Extras, RelativeBias
from longspan.scoring.pipeline import Dropout
from longspan.testing import run_loopback
from tests.cases import LAYOUTS, random_layout

B, H, G, D, E = 2, 4, 2, 8, 6
SCHEMES = ("ring", "all_gather", "all_to_all", "hybrid", "exchange")
NAMES = ("out", "lse", "dq", "dk", "dv")
LIMIT = 1e-12
"""Relative error in float64.

Scores here are at most a few hundred, so exp() makes of a rounding (1.1e-16) a few 1e-14 of a probability; a captured
tensor's gradient is a sum of up to B * S * S = 3,200 pairs, whose roundings add up as squares: 57 of them. Both at once
are 1e-12. Measured: at most a tenth of that.
"""


# -- the oracle --------------------------------------------------------------------------------------------------------


def pair_by_pair(function: Callable, scores: Tensor) -> Tensor:
    """The function's value for every pair, which it sees one at a time: all five arguments have no dims."""
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        function = torch.vmap(function, in_dims=dims)
    return function(scores, *(torch.arange(size) for size in scores.shape))


def t5_bucket(distance: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    """Which number of T5's table a pair gets; distance is query minus key."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    distance, near = max(distance, 0), buckets // 2
    if distance < near:
        return first + distance
    far = near + int(math.log(distance / near) / math.log(max_distance / near) * (buckets - near))
    return first + min(far, buckets - 1)


def changed_scores(
    scores: Tensor, *, softcap=None, alibi=None, relative_bias=None, bias=None, score_mod=None
) -> Tensor:
    """Scores after everything that may happen to them, in the order that `longspan.attention` promises."""
    size = scores.shape[2]
    distance = torch.arange(size)[:, None] - torch.arange(size)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores - alibi[:, None, None] * distance.abs()
    if relative_bias is not None:
        given = relative_bias.table.shape[0], relative_bias.bidirectional, relative_bias.max_distance
        which = torch.tensor([[t5_bucket(d, *given) for d in row] for row in distance.tolist()])
        scores = scores + relative_bias.table[which].permute(2, 0, 1)
    if bias is not None:
        scores = scores + bias
    return scores if score_mod is None else pair_by_pair(score_mod, scores)


def dense(q, k, v, seen, scale, *, sinks=None, kept=None, dropout=0.0, seed=None, **changes) -> tuple[Tensor, Tensor]:
    """Output and lse, differentiable. `seen` and `kept` are booleans (B, H, S, S); rows that see nothing: 0, -inf."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = changed_scores(scale * (q @ k.mT), **changes).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    top = scores.detach().amax(-1, keepdim=True).masked_fill(nothing, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    probabilities = (weights / total.masked_fill(nothing, 1.0))[..., : q.shape[2]]
    if kept is not None:
        probabilities = probabilities * kept / (1 - dropout)
    lse = (top + torch.log(total.masked_fill(nothing, 1.0))).masked_fill(nothing, -torch.inf)
    return probabilities @ v, lse.squeeze(-1)


def dense_answer(q, k, v, dout, seen, scale, score: "Score", kept=None) -> tuple[Tensor, ...]:
    """Output, lse and the gradients of q, k, v, of every learned tensor and of sinks, in float64."""
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = dense(*inputs, seen, scale, kept=kept, **score.arguments)
    leaves = [*inputs, *score.learned]
    found = torch.autograd.grad(out, leaves, dout.double(), allow_unused=True)
    zero = (torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True))
    return out.detach(), lse.detach(), *zero


def kept_pairs(score: "Score", batch: int, heads: int, tokens: int) -> Tensor | None:
    """Which pairs dropout spares, asked for one by one in a grid of all of them."""
    if not score.arguments.get("dropout"):
        return None
    grid = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, tokens, tokens)), indexing="ij")
    return Dropout(score.arguments["dropout"], score.arguments["seed"]).keeps(*(g.contiguous() for g in grid))


def seen_pairs(mask: Mask, tokens: int, batch: int = B, heads: int = H) -> Tensor:
    """The mask, pair by pair."""
    at = np.arange(tokens)
    rows = [[mask.allows(at[:, None], at[None, :], row=b, head=h) for h in range(heads)] for b in range(batch)]
    return torch.as_tensor(np.array(rows))


def relative_errors(found, answer, nothing: Tensor | None) -> list[float]:
    """Norms of the differences over that of the answer, or over a hundredth per number where that is more.

    `nothing` are the rows that see nothing: those are (0, -inf) exactly, and no other has lse -inf.
    """
    assert len(found) == len(answer), f"{len(found)} results, but {len(answer)} are expected"
    if nothing is not None:
        assert torch.equal(found[1].isneginf(), nothing), "lse is -inf where, and only where, a row sees nothing"
        assert not found[0][nothing].any(), "a row that sees nothing has an output"
        assert not found[2][nothing].any(), "a row that sees nothing has a gradient"
    errors = []
    for mine, right in zip(found, answer, strict=True):
        assert mine.shape == right.shape
        finite = right.isfinite()
        assert mine[finite].isfinite().all(), "not finite"
        size = max(float(right[finite].norm()), 1e-2 * max(right.numel(), 1) ** 0.5)
        errors.append(float((mine.detach().double() - right)[finite].norm()) / size)
    return errors


# -- score functions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """What is passed to `attention` beside tensors and mask; tensors in it that learn, in the order of first use."""

    name: str
    arguments: dict = field(default_factory=dict)
    learned: tuple[Tensor, ...] = ()
    """Sinks, if any, come last."""

    @property
    def detached_sinks(self) -> Tensor | None:
        """`run_loopback` runs below autograd, where operators get plain tensors."""
        return None if "sinks" not in self.arguments else self.arguments["sinks"].detach()

    @property
    def extras(self) -> Extras | None:
        given = {key: value for key, value in self.arguments.items() if key != "sinks"}
        return Extras(**given) if given else None


SCORES: dict[str, Callable[[torch.Generator, int], Score]] = {}


def score(function):
    """Enters a score function: made from a generator of random numbers and the number of tokens."""
    SCORES[function.__name__] = lambda draw, tokens: Score(function.__name__, *function(draw, tokens))
    return function


def learns(draw, *shape, size=1.0):
    return (size * torch.randn(*shape, generator=draw, dtype=torch.float64)).requires_grad_()


@score
def alibi(draw, tokens):
    slopes = learns(draw, H, size=0.3)
    return {"alibi": slopes}, (slopes,)


@score
def t5_table(draw, tokens):
    table = learns(draw, 12, H)
    return {"relative_bias": RelativeBias(table, bidirectional=True, max_distance=17)}, (table,)


@score
def t5_decoder_table(draw, tokens):
    table = learns(draw, 9, H)
    return {"relative_bias": RelativeBias(table, bidirectional=False, max_distance=23)}, (table,)


@score
def soft_cap(draw, tokens):
    return {"softcap": 1.3}, ()


@score
def sinks(draw, tokens):
    sinks = learns(draw, H)
    return {"sinks": sinks}, (sinks,)


@score
def bias_tensor(draw, tokens):
    bias = learns(draw, B, 1, tokens, tokens)
    return {"bias": bias}, (bias,)


@score
def pair_bias(draw, tokens):
    pairs = learns(draw, H, tokens, tokens)
    return {"score_mod": lambda s, b, h, q, kv: s + pairs[h, q, kv]}, (pairs,)


@score
def quadratic_distance(draw, tokens):
    coefficient = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    return {"score_mod": lambda s, b, h, q, kv: s - coefficient * (q - kv) ** 2}, (coefficient,)


@score
def slopes_by_head(draw, tokens):
    slopes, shifts = learns(draw, H, size=0.2), learns(draw, H)

    def score_mod(s, b, h, q, kv):
        return torch.where(q - kv > 3, s * shifts[h], s) + slopes[h] * (q - 2 * kv)

    return {"score_mod": score_mod}, (shifts, slopes)


@score
def document_relative(draw, tokens):
    """Tokens know their place in their document; a table has a number for the difference of two places."""
    place = torch.cat((torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)))
    table = learns(draw, 21, H)
    return {"score_mod": lambda s, b, h, q, kv: s + table[(place[q] - place[kv]).clamp(-10, 10) + 10, h]}, (table,)


@score
def tanh_gate(draw, tokens):
    gates, rows = learns(draw, H), learns(draw, B, tokens)

    def score_mod(s, b, h, q, kv):
        return s * torch.tanh(gates[h] + rows[b, q]) + torch.tanh(s) * rows[b, kv]

    return {"score_mod": score_mod}, (gates, rows)


@score
def temperature(draw, tokens):
    logarithm = learns(draw, H, size=0.5)
    return {"score_mod": lambda s, b, h, q, kv: s / logarithm.exp()[h]}, (logarithm,)


@score
def lookahead(draw, tokens):
    """Causal with two tokens of lookahead, said by a score and not by a mask."""
    return {"score_mod": lambda s, b, h, q, kv: torch.where(kv - q <= 2, s, -torch.inf)}, ()


@score
def composition(draw, tokens):
    cap, weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), learns(draw, H, size=0.1)

    def capped(s, b, h, q, kv):
        return cap * torch.tanh(s / cap)

    def leaning(s, b, h, q, kv):
        return s + weight[h] * (q - kv).abs().sqrt()

    return {"score_mod": lambda s, *at: leaning(capped(s, *at), *at)}, (cap, weight)


@score
def documents_by_sum(draw, tokens):
    """Mixes up a tile if it gets one: the sum must be over documents, never over positions."""
    starts = torch.tensor([5, tokens // 2, tokens - 4])
    table = learns(draw, 4, 4)

    def score_mod(s, b, h, q, kv):
        return s + table[(q >= starts).sum(), (kv >= starts).sum()]

    return {"score_mod": score_mod}, (table,)


@score
def by_batch_row(draw, tokens):
    weights = learns(draw, B, H)
    return {"score_mod": lambda s, b, h, q, kv: s + weights[b, h] * torch.sin(q + 2.0 * kv + b)}, (weights,)


@score
def dropped(draw, tokens):
    return {"dropout": 0.3, "seed": 1234567}, ()


@score
def everything(draw, tokens):
    slopes, table, bias, gate, sinks = (
        learns(draw, *shape) for shape in ((H,), (8, H), (1, H, tokens, 1), (B,), (H,))
    )  # fmt: skip
    given = {
        "softcap": 3.0,
        "alibi": slopes,
        "relative_bias": RelativeBias(table, max_distance=13),
        "bias": bias,
        "score_mod": lambda s, b, h, q, kv: s * torch.sigmoid(gate[b]) + (q % 3 == kv % 3),
        "dropout": 0.2,
        "seed": 99,
        "sinks": sinks,
    }
    return given, (slopes, table, bias, gate, sinks)


# -- masks -------------------------------------------------------------------------------------------------------------


def scattered_pairs(b, h, q, kv):
    return (q + 3 * kv) % 7 < 4


def by_row_and_head(b, h, q, kv):
    return (q * (h + 1) + kv + b) % 5 < 3


def rows_of(first, last, tokens):
    return Mask.of_bands(np.array([[first, last, 0, tokens, -tokens, tokens]]), tokens, f"rows {first}:{last}")


MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": masks.causal,
    "window": lambda n: masks.sliding_window(6, 2) & masks.full(n),
    "documents": lambda n: masks.documents([7, 1, n - 17, 9]) & masks.causal(),
    "prefix_lm": lambda n: masks.prefix_lm([4, 5], [n - 11, 11]),
    "full": masks.full,
    "per_head": lambda n: masks.per_head(
        masks.causal(n), masks.sliding_window(4), masks.full(n), masks.documents([n - 6, 6])
    ),
    "per_row": lambda n: masks.per_row(masks.documents([9, n - 9]) & masks.causal(), masks.sliding_window(8, 1)),
    "blind_rows": lambda n: masks.causal(n) & ~rows_of(6, 11, n),
    "opaque": lambda n: masks.from_mask_mod(scattered_pairs, within=masks.causal(n)),
    "opaque_rows_heads": lambda n: masks.from_mask_mod(by_row_and_head, n, rows=B, heads=H),
}  # fmt: skip


def masked(name: str, tokens: int) -> Mask:
    return MASKS[name](tokens).resized(tokens)


# -- cases -------------------------------------------------------------------------------------------------------------


def hybrid(scheme: str, world: int) -> str:
    return f"hybrid({3 if world == 3 else 2},exchange)" if scheme == "hybrid" else scheme


def made_plan(mask: Mask, layout: Layout, scheme: str, dtype="float64", **sizes) -> Plan:
    given = {"q_heads": H, "kv_heads": G, "head_dim": D, "v_head_dim": E, "batch": B} | sizes
    return ls.plan(mask, layout, dtype=dtype, scheme=hybrid(scheme, layout.world_size), **given)


def any_layout(rng: np.random.Generator, mask: Mask, tokens: int, world: int, most: int = 2) -> Layout:
    """A random layout of few spans: with many of them, time goes into bookkeeping that test_exact.py tests."""
    for _ in range(5):
        made = random_layout(rng, str(rng.choice(LAYOUTS)), mask, tokens, world)
        if len(made.table) <= most * world:
            return made
    return random_layout(rng, "contiguous", mask, tokens, world)


def random_inputs(draw: torch.Generator, tokens: int, batch=B, heads=(H, G), dims=(D, E)) -> list[Tensor]:
    """q, k, v and the output's gradient, float64."""
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])
    return [torch.randn(batch, h, tokens, d, generator=draw, dtype=torch.float64) for h, d in shapes]


@dataclass(frozen=True)
class Problem:
    """A mask, inputs and a score function, with the oracle's answer."""

    name: str
    score: Score
    mask: Mask
    inputs: list[Tensor]
    scale: float
    answer: tuple[Tensor, ...]
    nothing: Tensor
    """(B, H, S): rows that see nothing. With sinks, no row does."""

    @staticmethod
    def of(score: Score, mask: Mask, inputs: list[Tensor], scale: float = D**-0.5) -> "Problem":
        batch, heads, tokens = inputs[0].shape[:3]
        seen = seen_pairs(mask, tokens, batch, heads)
        answer = dense_answer(*inputs, seen, scale, score, kept_pairs(score, batch, heads, tokens))
        return Problem(f"{score.name} on {mask}", score, mask, inputs, scale, answer, answer[1].isneginf())

    def check(self, plan: Plan, limit: float = LIMIT) -> float:
        """Runs the plan in loopback; every result must be right. Returns the largest error."""
        found = run_loopback(
            plan, *self.inputs, scale=self.scale, sinks=self.score.detached_sinks, extras=self.score.extras
        )
        return self.compare(found, f"{plan!r}", limit)

    def compare(self, found, what: str, limit: float = LIMIT) -> float:
        """Every result must be right. Returns the largest error."""
        try:
            errors = relative_errors(found, self.answer, self.nothing)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.name}, {what}") from error
        for name, error in zip((*NAMES, *(f"learned {i}" for i in range(99))), errors, strict=False):
            assert error <= limit, f"{name} is off by {error:.3e}: {self.name}, {what}"
        return max(errors)


def problem(score: str, mask: str, tokens: int, seed: int) -> Problem:
    draw = torch.Generator().manual_seed(seed)
    return Problem.of(SCORES[score](draw, tokens), masked(mask, tokens), random_inputs(draw, tokens))
