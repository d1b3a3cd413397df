"""Random recurrences over ranks, all in one process, and the same token by token in float64.

A problem is drawn from a seed: operator, sizes, documents, layout and scheme. `loopback` asks the operator that users
call on every rank, with a thread for each; `one_device` says the recurrence as plainly as it can be said.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

import longspan as ls
from longspan.layouts import Layout
from longspan.masks.document_rows import document_rows
from longspan.mixers import scans
from longspan.mixers.scan_kernels import choose_scan_kernel
from longspan.mixers.scan_reference import ScanWork
from longspan.mixers.scan_run import LocalSegments, RankScan, spread
from longspan.mixers.scans import check_plan
from longspan.planning.scan_plan import ScanPlan
from tests.rank_threads import MeetingPoint, each_rank

FORMS = (
    "delta", "kda", "lightning", "lightning by head", "lightning by token", "gla", "ssd", "ssd with all", "elements",
    "own matrix", "own scalar", "own rows", "own elements",
)  # fmt: skip
LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "balanced", "scattered", "one token", "padded", "equal")
SCHEMES = ("chain", "doubling", "auto")
LIMIT = 1e-12


@dataclass(frozen=True, eq=False)
class Problem:
    """One call over all tokens. `tokens` are sharded along dim 1, `shared` is the same on every rank."""

    seed: int
    form: str
    tokens: dict[str, Tensor]
    shared: dict[str, Tensor]
    options: dict[str, Any]
    documents: Any
    layout: Layout
    scheme: str
    sizes: dict[str, Any]
    dout: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def batch(self) -> int:
        return next(iter(self.tokens.values())).shape[0]

    def plan(self, **other: Any) -> ScanPlan:
        found = {"dtype": "float64", "batch": self.batch, "scheme": self.scheme, "machine": "h100"} | other
        return ls.scan_plan(self.documents, self.layout, **self.sizes, **found)

    def __str__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in (self.tokens | self.shared).items()}
        return f"seed {self.seed}: {self.form} by {self.scheme} over {self.layout}, {self.documents}, {shapes}"


# -- drawing -----------------------------------------------------------------------------------------------------------


def problem(seed: int, **asked: Any) -> Problem:
    """The problem of a seed; `asked` fixes form, layout, scheme, world, total, documents or batch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    form = asked.get("form") or FORMS[seed % len(FORMS)]
    world = asked.get("world") or rng.choice((1, 2, 2, 2, 3, 3, 4, 5, 6, 7, 8))
    total = asked.get("total") or rng.choice((rng.randint(1, 6), rng.randint(3, 20), rng.randint(17, 40)))
    kind = asked.get("layout") or LAYOUTS[seed // len(FORMS) % len(LAYOUTS)]
    total = world if kind == "one token" else total
    batch = asked.get("batch") or rng.choice((1, 1, 2, 3))
    documents = asked["documents"] if "documents" in asked else random_documents(rng, total, batch)
    layout = random_layout(rng, kind, total, world, documents)
    scheme = asked.get("scheme") or rng.choice(SCHEMES)
    tokens, shared, options, sizes = random_tensors(rng, form, (batch, total))
    values = "b" if form == "elements" else "x" if form.startswith("ssd") else "v"
    dout = torch.randn(tokens.get(values, tokens.get("b", next(iter(tokens.values())))).shape, dtype=torch.float64)
    if form.startswith("own"):
        dout = torch.randn(batch, total, sizes["heads"], sizes["values"], dtype=torch.float64)
    return Problem(seed, form, tokens, shared, options, documents, layout, scheme, sizes, dout)


def random_documents(rng: random.Random, total: int, batch: int) -> Any:
    """None, lengths for all rows, or lengths per row, some rows alike."""
    if rng.random() < 0.2:
        return None
    if batch == 1 or rng.random() < 0.5:
        return random_lengths(rng, total)
    rows = [random_lengths(rng, total) for _ in range(batch)]
    return [rows[rng.randrange(batch)] if rng.random() < 0.3 else row for row in rows]


def random_lengths(rng: random.Random, total: int) -> list[int]:
    edges = sorted({0, total, *rng.sample(range(total), min(total, rng.randint(0, 8)))})
    return [b - a for a, b in itertools.pairwise(edges)]


def random_layout(rng: random.Random, kind: str, total: int, world: int, documents: Any) -> Layout:
    if kind in ("scattered", "padded", "one token"):  # any cut, any owner, ranks may stay empty
        cuts = rng.sample(range(1, total), min(total - 1, rng.randint(0, 2 * world)))
        edges = sorted({0, total, *(range(total) if kind == "one token" else cuts)})
        spans = list(itertools.pairwise(edges))
        rng.shuffle(spans)
        ranks: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        for at, span in enumerate(spans):
            ranks[at if kind == "one token" else rng.randrange(world)].append(span)
        padding = total + rng.randint(0, 3) if kind == "padded" else None
        return Layout.from_spans(total, ranks, local_len=padding)
    numbers = document_rows(documents, total)[0]
    lengths = np.bincount(numbers).tolist()
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    make = {
        "contiguous": lambda: ls.layouts.contiguous(total, world),
        "zigzag": lambda: ls.layouts.zigzag(total, world),
        "striped": lambda: ls.layouts.striped(total, world, stripe=rng.choice((1, 2, 5))),
        "per_document": lambda: ls.layouts.per_document(lengths, world),
        "balanced": lambda: ls.layouts.balanced(mask.resized(total), world_size=world),
        "equal": lambda: ls.layouts.zigzag(total, world, equal_tokens=True),
    }
    return make[kind]()


def random_tensors(rng: random.Random, form: str, lead: tuple[int, int]) -> tuple[dict[str, Tensor], ...]:
    """Tokens, shared tensors, options and the sizes that a plan needs."""
    j, r, k, v = rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice((1, 3, 4)), rng.choice((1, 2, 5))
    h, strength = j * r, rng.choice((0.02, 0.3, 3.0))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, dtype=torch.float64)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*lead, *shape, dtype=torch.float64)

    sizes = {"heads": h, "keys": k, "values": v, "maps": "scalar"}
    scale = rng.choice((None, 0.7))
    if form in ("delta", "kda"):
        l2norm = rng.random() < 0.5
        keys = randn(j, k) if l2norm else torch.nn.functional.normalize(randn(j, k), dim=-1)
        gate = -strength * (rand(h, k) if form == "kda" else rand(h))
        tokens = {"q": randn(j, k), "k": keys, "v": randn(h, v), "g": gate, "beta": rand(h)}
        return tokens, {}, {"scale": scale, "l2norm": l2norm}, sizes | {"maps": "matrix"}
    if form.startswith("lightning") or form == "gla":
        tokens = {"q": randn(j, k), "k": randn(j, k), "v": randn(h, v)}
        shared = {}
        if form == "lightning by head":
            shared["decay"] = -strength * torch.rand(h, dtype=torch.float64)
        elif form != "lightning":
            tokens["decay"] = -strength * (rand(h, k) if form == "gla" else rand(h))
        return tokens, shared, {"scale": scale}, sizes | {"maps": "rows" if form == "gla" and k > 1 else "scalar"}
    if form.startswith("ssd"):
        every = form == "ssd with all"
        tokens = {"x": randn(h, v), "dt": randn(h) if every else rand(h), "B": randn(j, k), "C": randn(j, k)}
        shared = {"A": -strength * torch.rand(h, dtype=torch.float64)}
        if every:
            shared["D"] = torch.randn(*rng.choice(((h,), (h, v))), dtype=torch.float64)
            shared["dt_bias"] = torch.randn(h, dtype=torch.float64) - 1
        limits = rng.choice(((0.0, float("inf")), (0.05, 0.6))) if every else (0.0, float("inf"))
        return tokens, shared, {"dt_softplus": every, "dt_limit": limits}, sizes
    if form == "elements":
        shape = rng.choice(((k,), (k, v)))
        a = torch.where(rand(*shape) < 0.1, 0.0, 2 * rand(*shape) - 1)
        channels = int(np.prod(shape))
        return {"a": a, "b": randn(*shape)}, {}, {}, {"heads": 1, "keys": channels, "values": 1, "maps": "elements"}
    maps = form.removeprefix("own ")
    shape = {"matrix": (h, k, k), "scalar": (h, 1, 1), "rows": (h, k, 1), "elements": (h, k, v)}[maps]
    tokens = {"a": (2 * rand(*shape) - 1) * (0.9 / k if maps == "matrix" else 1.0), "b": randn(h, k, v)}
    return (
        tokens,
        {"w": torch.randn(h, k, dtype=torch.float64)},
        {"maps": maps, "state": (h, k, v)},
        sizes | {"maps": maps},
    )


# -- asking ------------------------------------------------------------------------------------------------------------


def asked(p: Problem, tensors: dict[str, Tensor], **where: Any) -> Tensor:
    """The operator that users call, with these tensors."""
    if p.form in ("delta", "kda"):
        return ls.gated_delta_rule(**tensors, **p.options, **where)
    if p.form.startswith("lightning") or p.form == "gla":
        return ls.linear_attention(**tensors, **p.options, **where)
    if p.form.startswith("ssd"):
        return ls.ssd(**tensors, **p.options, **where)
    if p.form == "elements":
        return ls.linear_recurrence(**tensors, **where)
    w, is_dense = tensors["w"], p.form == "own matrix"

    def local(a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for a_t, b_t in zip(a, b, strict=True):
            state = (a_t @ state if is_dense else a_t * state) + b_t
            outs.append((w.unsqueeze(-1) * state).sum(1))
        return torch.stack(outs) if outs else b.sum(2), state

    def summary(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        u, m = torch.zeros_like(b[0]), torch.eye(b.shape[2], dtype=b.dtype) if is_dense else torch.ones_like(a[0])
        for a_t, b_t in zip(a, b, strict=True):
            u, m = (a_t @ u + b_t, a_t @ m) if is_dense else (a_t * u + b_t, a_t * m)
        return m, u

    where.pop("kernel", None)
    return ls.scan([tensors["a"], tensors["b"]], local=local, summary=summary, parameters=[w], **p.options, **where)


def leaves(tensors: dict[str, Tensor], wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_(wanted(name)) for name, t in tensors.items()}


def one_device(p: Problem) -> dict[str, Tensor]:
    """Output and gradients, by name, of the recurrence token by token."""
    found = leaves(p.tokens | p.shared)
    rows = np.broadcast_to(document_rows(p.documents, p.layout.seq_len), (p.batch, p.layout.seq_len))
    goes_on = torch.tensor(np.diff(rows, axis=1, prepend=-1) == 0, dtype=torch.float64)
    out = _by_tokens(p, found, goes_on.view(*goes_on.shape, 1, 1, 1))
    gradients = torch.autograd.grad(out, list(found.values()), p.dout, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(found, gradients, strict=True))}


def _by_tokens(p: Problem, x: dict[str, Tensor], goes_on: Tensor) -> Tensor:
    """Every form as S = decay * S [or A S] + ..., with a state (batch, heads, keys, values) that documents reset."""
    heads, keys, values = (p.sizes[name] for name in ("heads", "keys", "values"))
    beta, skip, write, read = None, 0.0, None, None
    is_dense = p.form == "own matrix"
    if p.form.startswith("ssd"):
        d = x["dt"] + x.get("dt_bias", 0.0)
        d = (softplus(d) if p.options["dt_softplus"] else d).clamp(*p.options["dt_limit"])
        decay, write, read = (x["A"] * d).exp()[..., None, None], x["B"], x["C"]
        v = x["x"] * d[..., None]
        if "D" in x:
            skip = x["x"] * (x["D"] if x["D"].ndim == 2 else x["D"][:, None])
    elif p.form == "elements":
        decay, v = x["a"].flatten(2)[:, :, None, :, None], x["b"].flatten(2)[:, :, None, :, None]
    elif p.form.startswith("own"):
        decay, v = x["a"], x["b"]
    else:
        q, k, v = x["q"], x["k"], x["v"]
        if p.options.get("l2norm"):
            q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        g = x.get("g", x.get("decay", torch.zeros((), dtype=torch.float64)))
        g = g.expand(v.shape[:3]) if g.ndim < 2 else g
        decay, beta = (g if g.ndim == 4 else g[..., None]).exp()[..., None], x.get("beta")
        write, read = k, q * (keys**-0.5 if p.options["scale"] is None else p.options["scale"])
    if write is not None and read is not None:
        write, read = (y.repeat_interleave(heads // y.shape[2], 2)[..., None] for y in (write, read))
    state, outs = torch.zeros(p.batch, heads, keys, values, dtype=torch.float64), []
    for t in range(p.layout.seq_len):
        state = goes_on[:, t] * state
        state = decay[:, t] @ state if is_dense else decay[:, t] * state
        if write is None:
            state = state + v[:, t]
        else:
            new = v[:, t, :, None]
            if beta is not None:
                new = beta[:, t, :, None, None] * (new - (write[:, t] * state).sum(2, keepdim=True))
            state = state + write[:, t] * new
        outs.append(state)
    states = torch.stack(outs, 1)
    if p.form == "elements":
        return states.reshape(p.dout.shape)
    if p.form.startswith("own"):
        return (x["w"][..., None] * states).sum(3)
    return (read * states).sum(3) + skip


@contextmanager
def in_threads() -> Iterator[None]:
    """While it lasts, operators take a `RankScan` as plan=, and run on the rank that it is for."""
    real = scans.run
    scans.run = _run_on_rank
    try:
        yield
    finally:
        scans.run = real


def _run_on_rank(recurrence: Any, tokens: Any, shared: Any, call: Any, kernel: str) -> Tensor:
    ranks: RankScan = call.plan
    check_plan(ranks.plan, recurrence, tokens, (ranks.rank, ranks.plan.layout.world_size))
    work = ScanWork(recurrence, tokens, shared, ranks.local.segments)
    given = (*tokens, *shared, *recurrence.captured)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    return spread(choose_scan_kernel(kernel, work), work, ranks, learns=learns)


def loopback(p: Problem, plan: ScanPlan, transport: Any = None, dtype: Any = None, **more: Any) -> dict[str, Tensor]:
    """Output and gradients by all ranks together; what ranks share is summed."""
    layout, world = plan.layout, plan.layout.world_size
    meeting = MeetingPoint(world, transport)
    dtype = torch.float64 if dtype is None else dtype
    wanted = more.get("wanted", lambda _: True)

    def work(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        own = {name: layout.shard(t.to(dtype), rank, 1) for name, t in p.tokens.items()}
        found = leaves(own | {name: t.to(dtype) for name, t in p.shared.items()}, wanted)
        ranks = RankScan(plan, rank, LocalSegments.of(plan, rank), meeting.carrier(rank))
        out = asked(p, found, plan=ranks)
        learn = {name: t for name, t in found.items() if t.requires_grad}
        dout = layout.shard(p.dout.to(out.dtype), rank, 1)
        gradients = torch.autograd.grad(out, list(learn.values()), dout, materialize_grads=True)
        return out.detach(), dict(zip(learn, gradients, strict=True))

    with in_threads():
        found = each_rank(work, world, meeting)
    whole = {"out": layout.unshard([out for out, _ in found], 1)}
    for name in found[0][1]:
        parts = [gradients[name] for _, gradients in found]
        whole[name] = layout.unshard(parts, 1) if name in p.tokens else torch.stack(parts).double().sum(0)
    return whole


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each, relative to the largest number expected, or 1 if that is more."""
    result = {}
    for name, got in found.items():
        want = expected[name]
        assert got.shape == want.shape, (name, got.shape, want.shape)
        gap = (got.double() - want).abs().max() / want.abs().max().clamp(min=1.0) if want.numel() else torch.zeros(())
        result[name] = float(torch.nan_to_num(gap, nan=torch.inf))
    return result
