"""Random convolutions, the same on every rank, and what they must give: each document of each batch row by itself."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

import longspan as ls
from longspan.layouts import Layout
from longspan.mixers.convolution import OwnRows, convolve_with_halos
from longspan.run.halo import HaloBackward, HaloForward, HaloTask
from longspan.run.transports import Loopback
from tests.cases import LAYOUTS, random_layout, random_lengths

KINDS = (*LAYOUTS, "one token a rank", "empty ranks")
NAMES = ("out", "dx", "dweight", "dbias")


@dataclass(frozen=True)
class ConvCase:
    """Documents of every batch row, a layout, and whole tensors."""

    lengths: list
    layout: Layout
    tensors: tuple
    activation: str | None

    @property
    def documents(self):
        """As a user says it: once where all rows are alike."""
        alike = all(row == self.lengths[0] for row in self.lengths)
        return self.lengths[0] if alike else self.lengths

    @property
    def plan(self):
        x, weight, *_ = self.tensors
        size = {"channels": x.shape[2], "width": weight.shape[1], "batch": x.shape[0]}
        return ls.conv_plan(self.documents, self.layout, **size, dtype=x.dtype)

    def __str__(self):
        shapes = [None if t is None else tuple(t.shape) for t in self.tensors]
        return f"{self.lengths} over {self.layout.text()}, {shapes}, {self.activation}"


def spread(rng, kind, total, world):
    """A layout of this kind."""
    if kind == "one token a rank":
        order = rng.permutation(total) if rng.random() < 0.5 else np.arange(total)
        return Layout.from_spans(total, [[(int(at), int(at) + 1)] for at in order])
    if kind == "empty ranks":
        own = rng.integers(0, max(1, world // 2), size=total) * 2
        rows = [[(int(at), int(at) + 1) for at in np.flatnonzero(own == rank)] for rank in range(world)]
        return Layout.from_spans(total, rows, local_len=None if rng.random() < 0.5 else total)
    return random_layout(rng, kind, ls.masks.documents(random_lengths(rng, total)) & ls.masks.causal(), total, world)


def conv_case(seed, world=None, dtype=torch.float64):
    """The case of a seed."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % (len(KINDS) if world is None else len(KINDS) - 2)]
    total = int(rng.integers(1, 9 if kind == "one token a rank" else 60))
    batch, channels = int(rng.choice([1, 1, 2, 3])), int(rng.integers(1, 6))
    width = int(rng.choice([1, 2, 3, 4, 4, 7, 64]))
    lengths = [[int(n) for n in random_lengths(rng, total)] for _ in range(batch)]
    if rng.random() < 0.5:
        lengths = [lengths[0]] * batch
    layout = spread(rng, kind, total, int(rng.integers(1, 9)) if world is None else world)
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, total, channels), (channels, width), (channels,), (batch, total, channels)]
    x, weight, bias, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    given = (x, weight, None if rng.random() < 0.3 else bias, dout)
    return ConvCase(lengths, layout, given, (None, "silu", "swish")[int(rng.integers(3))])


def expected(case):
    """Output and gradients of whole tensors, one document at a time, in float64."""
    x, weight, bias, dout = (None if t is None else t.double().requires_grad_() for t in case.tensors)
    rows = []
    for row, lengths in enumerate(case.lengths):
        for part in x[row].split(lengths):
            padded = functional.pad(part.T, (weight.shape[1] - 1, 0))
            rows.append(functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).T if len(part) else part)
    out = torch.cat(rows).view(x.shape)
    out = out if case.activation is None else out * out.sigmoid()
    given = [t for t in (x, weight, bias) if t is not None]
    return out, *torch.autograd.grad(out, given, dout)


def worst(found, wanted):
    """The largest difference of each result, relative to its largest entry or 1."""
    return [
        float((a.double() - b).abs().max()) / max(1.0, float(b.abs().max())) if b.numel() else 0.0
        for a, b in zip((t.detach() for t in found), (t.detach() for t in wanted), strict=True)
    ]


def run_conv_loopback(plan, x, weight, bias, dout, *, activation=None, transport=None):
    """Return output, dx, dweight and, with a bias, dbias of whole tensors, computed by all ranks of the plan together.

    The last two are summed over the ranks. Padding slots hold nan, which must not show.
    """
    layout, carry = plan.layout, Loopback() if transport is None else transport
    ranks = range(layout.world_size)
    tasks = [HaloTask(plan, rank, x.dtype) for rank in ranks]
    shared = [t.detach().requires_grad_() for t in (weight, bias) if t is not None]
    rows = carry.run([HaloForward(tasks[r], layout.shard(x.detach(), r, 1, torch.nan)).program() for r in ranks])
    parts, drows, gradients = [], [], []
    for r in ranks:
        rows[r].requires_grad_()
        own = OwnRows.of(plan, r, x.device)
        out = convolve_with_halos(rows[r], shared[0], shared[1] if len(shared) > 1 else None, own, activation)
        drow, *grads = torch.autograd.grad(out, (rows[r], *shared), layout.shard(dout, r, 1, torch.nan))
        parts.append(out.detach())
        drows.append(drow)
        gradients.append(grads)
    dx = carry.run([HaloBackward(tasks[r], drows[r]).program() for r in ranks])
    sums = [torch.stack(grads).sum(0) for grads in zip(*gradients, strict=True)]
    return layout.unshard(parts, 1), layout.unshard(dx, 1), *sums
