"""Random plans with several attention calls one behind the other, run plainly and on simulated GPUs."""

import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from longspan import layouts
from longspan.kernels.cuda_flash import Flash
from longspan.planning import Problem, Sizes, scheme
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan
from longspan.planning.planners import PLANNERS
from longspan.run import transports
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from tests.cases import LAYOUTS, random_layout, random_mask
from tests.simulation.streams import Simulation
from tests.simulation.streams_group import SimulatedNccl, run, simulated

KINDS = ("causal", "full", "documents", "window", "prefix", "chunked", "sinks", "per_head", "per_row")
DTYPES = ("float32", "bfloat16", "float16")
WORLDS = (2, 3, 4, 2, 3, 4, 2, 3, 4, 2, 3, 6)
SCALE = 0.5
AHEAD = (1.0, 0.97, 0.85)
"""How far hosts are ahead of GPUs: all the way, some dozens of operations, a few."""


# -- flash attention as one operation ----------------------------------------------------------------------------------


def _pairs(starts_q, starts_k, num_q, num_k, window):
    """(rows, keys) bool: what a launch shows, one slice for each pair of neighbours in `starts`."""
    q, k = torch.arange(num_q), torch.arange(num_k)
    if starts_q is None:
        starts_q, starts_k = torch.tensor([0, num_q]), torch.tensor([0, num_k])
    slice_q, slice_k = (
        torch.searchsorted(s[1:].contiguous(), x, right=True) for s, x in ((starts_q, q), (starts_k, k))
    )
    shift = starts_k.diff() - starts_q.diff()  # diagonals end in the bottom-right corner
    diagonal = (q - starts_q[slice_q] + shift[slice_q])[:, None]
    key = (k - starts_k[slice_k])[None]
    shown = slice_q[:, None] == slice_k[None]
    left, right = window
    shown &= (key >= diagonal - left) if left >= 0 else True
    return shown & ((key <= diagonal + right) if right >= 0 else True)


def _heads_first(x):
    """(B, H, S, D) in float32, of (B, S, H, D) or of packed (T, H, D)."""
    return (x if x.dim() == 4 else x[None]).transpose(1, 2).float().contiguous()


def _shared(x, heads):
    """Keys for every query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _scores(q, k, v, starts_q, starts_k, window, scale):
    q4, k4, v4 = map(_heads_first, (q, k, v))
    k4, v4 = _shared(k4, q4.shape[1]), _shared(v4, q4.shape[1])
    hidden = ~_pairs(starts_q, starts_k, q4.shape[2], k4.shape[2], window)
    return q4, k4, v4, (q4 @ k4.mT * scale).masked_fill(hidden, -torch.inf)


def _like(x_BHSD, like):
    made = x_BHSD.transpose(1, 2).to(like.dtype)
    return made if like.dim() == 4 else made[0]


def attend(q, k, v, starts_q, starts_k, *, window, scale):
    _, _, v4, scores = _scores(q, k, v, starts_q, starts_k, window, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v4
    return _like(out, q), lse if q.dim() == 4 else lse[0]


def attend_back(dout, q, k, v, out, lse, starts_q, starts_k, *, window, scale):
    q4, k4, v4, scores = _scores(q, k, v, starts_q, starts_k, window, scale)
    dout4, out4 = _heads_first(dout), _heads_first(out)
    p = (scores - (lse if lse.dim() == 3 else lse[None]).unsqueeze(-1)).exp()
    ds = p * (dout4 @ v4.mT - (dout4 * out4).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ k4, ds.mT @ q4, p.mT @ dout4
    groups = k.shape[-2]
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return _like(dq, q), _like(dk, k), _like(dv, v)


class Attention:
    """The operators that `Flash` calls, at once on CPU tensors, and as one queued operation on simulated GPUs."""

    simulation: Simulation | None = None

    def forward(self, q, k, v, starts_q, starts_k, longest, window, scale):
        function, tensors = partial(attend, window=window, scale=scale), (q, k, v, starts_q, starts_k)
        if not q.is_meta:
            return function(*tensors)
        shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
        return self.queued(function, tensors, [torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)])

    def backward(self, dout, q, k, v, out, lse, starts_q, starts_k, longest, window, scale):
        function = partial(attend_back, window=window, scale=scale)
        tensors = (dout, q, k, v, out, lse, starts_q, starts_k)
        if not q.is_meta:
            return function(*tensors)
        return self.queued(function, tensors, [torch.empty_like(x) for x in (q, k, v)])

    def queued(self, function, tensors, results):
        self.simulation.gpu.launch(function, tensors, results)
        return tuple(results)


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Case:
    """A plan for every rank (equal, but each has its own, as processes do), and inputs of some calls."""

    plans: list[Plan]
    layers: int
    seed: int
    kinds: tuple[str, ...] = ()
    """Of its mask and layout."""

    def __post_init__(self):
        plan = self.plans[0]
        draw, s = torch.Generator().manual_seed(self.seed), plan.sizes
        self.dtype, self.operators = getattr(torch, plan.dtype), Attention()
        heads, dims = (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads), (s.head_dim,) * 2 + (s.v_head_dim,) * 2
        self.shards = [[] for _ in self.plans]
        for _ in range(self.layers):
            whole = [
                torch.randn(s.batch, h, plan.layout.seq_len, d, generator=draw).to(self.dtype)
                for h, d in zip(heads, dims, strict=True)
            ]
            for rank, shards in enumerate(self.shards):
                shards.append([plan.layout.shard(t, rank, 2) for t in whole])
        self.is_chained = s.head_dim == s.v_head_dim
        self.kernel = Flash(op=self.operators.forward, backward_op=self.operators.backward)

    def __str__(self):
        plan = self.plans[0]
        return f"{plan.scheme.name} of {plan.mask} over {plan.layout}, {plan.sizes}, {plan.dtype}, {self.layers} calls"

    def job(self, rank):
        return Job(self.plans[rank], rank, self.kernel, SCALE, self.dtype)

    def hosts(self, shards):
        """Every rank's part of a model of some layers, as a generator that yields programs and is sent results: layer
        by layer forward, then backward. A layer's queries and output gradients come from its neighbours."""
        return [self.host(rank, layers) for rank, layers in enumerate(shards)]

    def host(self, rank, layers):
        saved, results, above = [], [], None
        for q, k, v, _ in layers:
            q = q if above is None else q + above
            out, lse, kept = yield "forward", lambda q=q, k=k, v=v: Forward(self.job(rank), q, k, v).program(saves=True)
            saved.append(Saved(q, k, v, out, lse, kept))
            above = out if self.is_chained else None
            results += [out, lse]
        above = None
        while saved:
            dout = layers[len(saved) - 1][3]
            dout = dout if above is None else dout + above
            found = yield "backward", lambda dout=dout: Backward(self.job(rank), saved.pop(), dout).program()
            above = found[0] if self.is_chained else None
            results += found
        return results

    def plainly(self):
        """What every rank gets when ranks take turns on CPU tensors."""
        hosts, found = self.hosts(self.shards), [None] * len(self.plans)
        with torch.no_grad():
            while True:
                try:
                    made = [host.send(answer) for host, answer in zip(hosts, found, strict=True)]
                except StopIteration as stop:
                    return [stop.value, *map(ended, hosts[1:], found[1:])]
                found = Loopback().run([make() for _, make in made])


def ended(host, answer):
    try:
        host.send(answer)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("ranks make the same calls")


def schemes(world):
    """Every planner, and hybrids of it wherever ranks divide into groups."""
    groups = [n for n in range(2, world) if world % n == 0]
    return [*PLANNERS, "all_to_all", *(f"hybrid({n},{name})" for n in groups for name in PLANNERS)]


def case_of(seed, *, worlds=WORLDS, layers=(2, 2, 2, 2, 3), tokens=(8, 24), name=None, dense=False):
    """The case of a seed; if it is `dense`, every rank needs as many rows of every other."""
    rng = np.random.default_rng(seed)
    world = worlds[seed % len(worlds)]
    names = schemes(world)
    name = name or names[seed // len(worlds) % len(names)]
    kv_heads, share, dim = (int(rng.choice(options)) for options in ((1, 2), (1, 2), (4, 8)))
    dtype, kind, cut = (str(rng.choice(options)) for options in (DTYPES, KINDS, LAYOUTS))
    v_dim, batch = int(rng.choice((dim, 4))), int(rng.choice((1, 1, 2)))
    sizes = Sizes(kv_heads * share, kv_heads, dim, v_dim, getattr(torch, dtype).itemsize, batch)
    total = int(rng.integers(*tokens))
    if dense:
        total, kind = total // world * world, ("full", "causal")[seed % 2]
        sizes = replace(sizes, v_head_dim=dim)  # calls depend on each other
    mask = random_mask(rng, kind, total, sizes)
    layout = layouts.striped(total, world, stripe=1) if dense else random_layout(rng, cut, mask, total, world)
    made = scheme(name, Problem.make(mask, layout, sizes))
    keep = bool(rng.random() < 0.3)
    plans = [Plan(mask, layout, sizes, dtype, made, CPU, True, keep) for _ in range(world)]
    return Case(plans, int(rng.choice(layers)), seed, (kind, cut))


# -- on simulated GPUs -------------------------------------------------------------------------------------------------


def on_gpus(case, seed, *, ahead, nccl=SimulatedNccl, records=True):
    """What every rank gets on simulated GPUs, and the simulation."""
    simulation = Simulation(len(case.plans), seed, ahead)
    for gpu in simulation.gpus:
        gpu.memory.records = records
    case.operators.simulation = simulation
    shards = [
        [[gpu.upload(t) for t in layer] for layer in layers]
        for gpu, layers in zip(simulation.gpus, case.shards, strict=True)
    ]
    with simulated(nccl(simulation)):
        results = queue(case, simulation, shards)
        simulation.drain()
    return [[gpu.read(t) for t in found] for gpu, found in zip(simulation.gpus, results, strict=True)], simulation


def queue(case, simulation, shards):
    """Every rank's host does all its calls, one call at a time, ranks in any order. A rank's first call in a direction
    may copy from the host what its plan fixes; the others may not."""
    hosts, results, known = case.hosts(shards), {}, set()
    answers = dict.fromkeys(range(len(hosts)))
    draw = random.Random(simulation.draw.random())
    while answers:
        rank = draw.choice(list(answers))
        with simulation.host(rank):
            try:
                direction, make = hosts[rank].send(answers[rank])
            except StopIteration as stop:
                results[rank] = stop.value
                del answers[rank]
                continue
            simulation.warm = (rank, direction) in known
            known.add((rank, direction))
            answers[rank] = run(simulation, rank, make(), case.plans[rank], direction)
        simulation.advance()
    return [results[rank] for rank in range(len(hosts))]


def same(found, expected):
    """Whether all bits are the same."""
    return all(
        len(a) == len(b)
        and all(
            x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))
            for x, y in zip(a, b, strict=True)
        )
        for a, b in zip(found, expected, strict=True)
    )


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8)


def check(seed):
    """Runs the case of a seed: all ranks' results are those of the plain run, bit for bit, and all streams end."""
    case = case_of(seed)
    expected = case.plainly()
    most, transports.MAX_BATCH = transports.MAX_BATCH, (transports.MAX_BATCH, 2, 4)[seed % 3]
    try:
        found, _ = on_gpus(case, seed, ahead=AHEAD[seed // 3 % 3])
    except Exception as error:
        error.add_note(f"{case}; run again with: check({seed})")
        raise
    finally:
        transports.MAX_BATCH = most
    assert same(found, expected), f"{case} differs from the plain run; run again with: check({seed})"
