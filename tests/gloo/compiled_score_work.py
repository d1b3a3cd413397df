"""Models whose layers change scores, compiled and by every pair written out; what ranks do with them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import longspan as ls
from longspan.scores import RelativeBias
from tests.gloo.compiled_work import Counting
from tests.score_cases import SCORES, B, D, G, H, Score, dense, kept_pairs, masked, seen_pairs

S, WIDTH = 40, 24
LIMIT = 1e-10
"""Relative, in float64: `score_cases.LIMIT` (1e-12 for one call) times what four layers of products of norm about 1
make of it, forward and back: less than 10 for each of two layers in between."""


# -- score functions as models write them: parameters of a module, values of the forward pass --------------------------


class Made(nn.Module):
    """Functions that are made in every forward pass."""

    def __init__(self, kind: str, draw: torch.Generator) -> None:
        super().__init__()
        self.kind = kind
        self.slopes = nn.Parameter(0.3 * torch.randn(H, generator=draw, dtype=torch.float64))
        self.table = nn.Parameter(torch.randn(16, H, generator=draw, dtype=torch.float64))
        self.gate = nn.Linear(WIDTH, H).double()
        self.mix = nn.Linear(2, 1).double()
        self.register_buffer("ids", torch.arange(4 * S) // 7)
        with torch.no_grad():
            for p in (*self.gate.parameters(), *self.mix.parameters()):
                p.copy_(0.3 * torch.randn(p.shape, generator=draw, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict:
        return getattr(self, self.kind)(x)

    def positive_slopes(self, x: Tensor) -> dict:
        """What does not depend on the pair is worked out in the graph."""
        return {"score_mod": lambda s, b, h, q, kv: s - functional.softplus(self.slopes)[h] * (q - kv).abs()}

    def gated_by_tokens(self, x: Tensor) -> dict:
        """Captures a value of the forward pass, and hands a gradient on to the layers before."""
        gate = torch.sigmoid(self.gate(x.mean(1)))
        return {"score_mod": lambda s, b, h, q, kv: s * gate[b, h]}

    def small_network(self, x: Tensor) -> dict:
        """A network of a pair, for which PyTorch maps over single pairs."""

        def score_mod(s, b, h, q, kv):
            return s + self.mix(torch.stack([s, torch.tanh((q - kv) / 8.0)]))[0]

        return {"score_mod": score_mod}

    def documents(self, x: Tensor) -> dict:
        def score_mod(s, b, h, q, kv):
            here = self.ids[q] == self.ids[kv]
            return torch.where(here, s, s * self.slopes[h]).clamp(min=-20.0, max=20)

        return {"score_mod": score_mod}

    def helper_of_helpers(self, x: Tensor) -> dict:
        scale = x.shape[2] ** -0.5

        def distance(q, kv):
            return torch.log1p((q - kv).abs().to(torch.float64)) * scale

        def score_mod(s, b, h, q, kv):
            y = s.sub(distance(q, kv) * self.slopes[h])
            y += self.table[(q - kv).abs().clamp(max=15), h]
            with torch.no_grad():
                high = (s > 1).to(s.dtype)
            return y + high * 0.5

        return {"score_mod": score_mod}

    def named_by_parameters(self, x: Tensor) -> dict:
        relative = RelativeBias(self.table, bidirectional=True, max_distance=24)
        return {"softcap": 4.0, "alibi": self.slopes.exp(), "relative_bias": relative}

    def bias_of_the_layer(self, x: Tensor) -> dict:
        bias = torch.einsum("bqc,bkc->bqk", x, x)[:, None] * 0.1
        return {"bias": bias, "score_mod": lambda s, b, h, q, kv: 3.0 * torch.tanh(s / 3.0) + self.slopes[h]}


MADE = [name for name in vars(Made) if not name.startswith("_") and name != "forward"]
GIVEN = [name for name in SCORES if name != "dropped"]
MASKS = ("causal", "window", "documents", "per_head", "blind_rows", "opaque", "prefix_lm", "full")


@dataclass(frozen=True)
class Case:
    """What one layer does: a score function by name, and a mask by name."""

    score: str
    mask: str


def cases() -> list[Case]:
    """40 of them: every score function under one mask, and as many as are left under another one."""
    names = [*GIVEN, *MADE]
    first = [Case(name, MASKS[i % len(MASKS)]) for i, name in enumerate(names)]
    again = [Case(name, MASKS[(i + 3) % len(MASKS)]) for i, name in enumerate(names)]
    return [*first, *reversed(again)][:40]


# -- the model ---------------------------------------------------------------------------------------------------------

Attend = Callable[..., Tensor]


class Layer(nn.Module):
    def __init__(self, case: Case, draw: torch.Generator, tokens: int) -> None:
        super().__init__()
        self.case = case
        self.given = SCORES[case.score](draw, tokens) if case.score in SCORES else None
        self.made = Made(case.score, draw) if self.given is None else None
        self.leaves = () if self.given is None else self.given.learned  # plain tensors, which closures hold
        sizes = (WIDTH, H * D), (WIDTH, G * D), (WIDTH, G * D), (H * D, WIDTH)
        self.weights = nn.ParameterList(
            torch.randn(*size, generator=draw, dtype=torch.float64) / size[0] ** 0.5 for size in sizes
        )

    def arguments(self, x: Tensor) -> dict:
        return self.given.arguments if self.made is None else self.made(x)

    def forward(self, x: Tensor, attend: Attend, mask: object) -> Tensor:
        to_q, to_k, to_v, back = self.weights
        q, k, v = (
            (x @ weight).unflatten(-1, (-1, D)).transpose(1, 2) for weight in (to_q, to_k, to_v)
        )  # heads side by side in every token, as models have them
        out = attend(q, k, v, mask, **self.arguments(x))
        return x + out.transpose(1, 2).flatten(2) @ back


class Net(nn.Module):
    def __init__(self, chosen: list[Case], seed: int = 0, tokens: int = S) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(Layer(case, draw, tokens) for case in chosen)

    def forward(self, x: Tensor, attend: Attend, masks: list) -> Tensor:
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, attend, mask)
        return x

    def learning(self) -> list[Tensor]:
        return [*self.parameters(), *(leaf for layer in self.layers for leaf in layer.leaves)]


def by_longspan(q, k, v, mask, **arguments):
    return ls.attention(q, k, v, mask, **arguments)


def by_pairs(q, k, v, mask, **arguments):
    """Every pair written out."""
    kept = kept_pairs(Score("", arguments), q.shape[0], H, q.shape[2])
    return dense(q, k, v, seen_pairs(mask, q.shape[2], q.shape[0], H), D**-0.5, kept=kept, **arguments)[0]


def answers(net: Net, x: Tensor, dout: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Output, and the gradients of the input and of all that learns."""
    x = x.detach().clone().requires_grad_()
    out = call(x)
    found = torch.autograd.grad(out, [x, *net.learning()], dout, allow_unused=True)
    zero = (torch.zeros_like(t) if g is None else g for t, g in zip([x, *net.learning()], found, strict=True))
    return [out.detach(), *zero]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any result, relative to its largest number."""
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(found, expected, strict=True)]
    return max(errors) if all(e == e for e in errors) else float("inf")


def batch(seed: int, tokens: int = S) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, B, tokens, WIDTH, generator=draw, dtype=torch.float64))


# -- over ranks --------------------------------------------------------------------------------------------------------


def over_ranks(chosen: list[Case], backend: str, num_batches: int) -> tuple[float, int]:
    """The worst error on this rank against one device, and how often was compiled."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    net, layout, compiler = Net(chosen), ls.layouts.zigzag(S, world), Counting(backend)
    sizes = {"q_heads": H, "kv_heads": G, "head_dim": D, "dtype": "float64", "batch": B}

    def attend(q, k, v, plan, **arguments):
        return ls.attention(q, k, v, plan, group=group, **arguments)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, plans: net(x, attend, plans), backend=compiler, fullgraph=True)
    worst_error = 0.0
    for n in range(num_batches):
        x, dout = batch(n)
        masks = [masked(case.mask, S) for case in chosen]
        plans = [ls.plan(mask, layout, **sizes) for mask in masks]
        expected = answers(net, x, dout, lambda x, masks=masks: net(x, by_pairs, masks))
        mine, mine_dout = (layout.shard(t, rank, dim=1) for t in (x, dout))
        found = answers(net, mine, mine_dout, lambda x, plans=plans: compiled(x, plans))
        weights = {id(w) for layer in net.layers for w in layer.weights}
        for at, leaf in enumerate(net.learning(), 2):
            if id(leaf) in weights:  # those of products are this rank's share, as in any model
                dist.all_reduce(found[at])
        expected[:2] = [layout.shard(t, rank, dim=1) for t in expected[:2]]
        worst_error = max(worst_error, worst(found, expected))
    return worst_error, compiler.made
