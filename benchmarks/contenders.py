"""Contenders of `benchmarks.attention`: forward and backward of one attention, on one rank of many.

All contenders get the same tokens. Their results are compared with the bare kernel's before anything is timed.
PyTorch's ring and its flex context parallelism are driven through private names, because neither runs on CPUs as
shipped: the ring has no CPU dispatch, and flex rejects a backward on CPUs in a check (`_validate_device`) that is
bypassed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import longspan as ls

HEADS, DIM = 8, 64
SHOWN = ("out", "dq", "dk", "dv")
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Work:
    """Causal attention of one sequence, inside documents if there are any."""

    seq_len: int
    dtype: str
    lengths: tuple[int, ...] = ()

    @cached_property
    def mask(self) -> ls.masks.Mask:
        whole = ls.masks.causal(self.seq_len)
        return ls.masks.documents(self.lengths) & ls.masks.causal() if self.lengths else whole

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return start and stop of every document."""
        stops = np.cumsum(self.lengths or (self.seq_len,)).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def tensors(self) -> Results:
        """Return q, k, v and the gradient of the output, the same on every rank."""
        chance = torch.Generator().manual_seed(0)
        shape = (1, HEADS, self.seq_len, DIM)
        return tuple(torch.randn(shape, generator=chance).to(getattr(torch, self.dtype)) for _ in range(4))

    def dense_mask(self) -> Tensor:
        number = torch.repeat_interleave(torch.arange(len(self.spans)), torch.tensor([b - a for a, b in self.spans]))
        return (number[:, None] == number[None, :]).tril_()


def documents(seq_len: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Return uneven lengths with that mean.

    >>> len(documents(8192, 1024)), sum(documents(8192, 1024))
    (8, 8192)
    """
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.7, size=seq_len // mean)
    lengths = np.maximum((drawn / drawn.sum() * seq_len).astype(np.int64), 16)
    lengths[lengths.argmax()] += seq_len - lengths.sum()
    return tuple(lengths.tolist())


Call = Callable[[], Results]


def bare(work: Work) -> Call:
    """Run the fused kernel in one process, once per document."""
    q, k, v, dout = work.tensors()
    parts = [[t[:, :, start:stop].contiguous() for t in (q, k, v, dout)] for start, stop in work.spans]

    def call() -> Results:
        result = [_through_autograd(partial(F.scaled_dot_product_attention, is_causal=True), *part) for part in parts]
        return result[0] if len(result) == 1 else tuple(torch.cat(each, 2) for each in zip(*result, strict=True))

    return call


def dense(work: Work) -> Call:
    """Run the fused kernel with the whole mask as a boolean matrix."""
    tensors, mask = work.tensors(), work.dense_mask()
    return lambda: _through_autograd(partial(F.scaled_dot_product_attention, attn_mask=mask), *tensors)


def one_device(work: Work) -> Call:
    """Run Longspan on one device."""
    tensors = work.tensors()
    return lambda: _through_autograd(lambda q, k, v: ls.attention(q, k, v, work.mask), *tensors)


def plan_of(work: Work, layout: ls.layouts.Layout, scheme: str) -> ls.Plan:
    return ls.plan(
        work.mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, dtype=work.dtype, scheme=scheme,
        machine="cpu",
    )  # fmt: skip


def layout_of(work: Work, name: str, world_size: int) -> ls.layouts.Layout:
    if name == "zigzag":
        return ls.layouts.zigzag(work.seq_len, world_size)
    return ls.layouts.balanced(work.mask, world_size=world_size)


def longspan(work: Work, layout: str, scheme: str) -> Call:
    """Run this rank's part of a plan."""
    group = dist.group.WORLD
    plan = plan_of(work, layout_of(work, layout, dist.get_world_size()), scheme)
    tensors = [plan.layout.shard(t, dist.get_rank(), 2) for t in work.tensors()]
    return lambda: _through_autograd(lambda q, k, v: ls.attention(q, k, v, plan, group=group), *tensors)


def torch_ring(work: Work, rotate: str) -> Call:
    """Run PyTorch's ring over head-tail shards with the CPU kernels, without autograd."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    group, op = dist.group.WORLD, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert group is not None
    layout = layout_of(work, "zigzag", dist.get_world_size())
    q, k, v, dout = (layout.shard(t, dist.get_rank(), 2) for t in work.tensors())
    assert not work.lengths, "PyTorch's ring knows no documents"

    def call() -> Results:
        private.set_rotate_method(rotate)
        out, lse = private._templated_ring_attention(group, 2, op, q, k, v, is_causal=True, dropout_p=0.0)
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = private._templated_ring_attention_backward(
            group, 2, back, dout, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return out, *grads

    return call


def torch_flex(work: Work) -> Call:
    """Run PyTorch's flex context parallelism over head-tail shards, eager (compiled flex has no backward on CPUs)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as private
    from torch.nn.attention import flex_attention as flex

    flex._validate_device = lambda *_: None  # its check forbids gradients on CPUs, which work
    private._compiled_create_block_mask = flex.create_block_mask  # compiling it takes 20 s and is not timed anyway
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    number = torch.repeat_interleave(torch.arange(len(work.spans)), torch.tensor([b - a for a, b in work.spans]))
    block_mask = private._create_cp_block_mask(
        lambda _b, _h, i, j: (number[i] == number[j]) & (i >= j), 1, 1, work.seq_len, work.seq_len, mesh
    )
    layout = layout_of(work, "zigzag", world_size)
    tensors = [layout.shard(t, dist.get_rank(), 2) for t in work.tensors()]
    gather = torch.ops.cplib.flex_cp_allgather  # registered by the module above

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flex.flex_attention(q, *gather(k, v, 2, mesh.get_group().group_name), block_mask=block_mask)
        assert isinstance(result, Tensor)
        return result

    return lambda: _through_autograd(run, *tensors)


def _through_autograd(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = run(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


@dataclass(frozen=True)
class Entry:
    """A contender by name: a function of this file, its arguments, and the layout of its results."""

    name: str
    make: Callable[..., Call]
    args: tuple[str, ...] = ()
    layout: str | None = None
    """None: it runs on rank 0 alone, while the others wait."""


@dataclass(frozen=True)
class Timing:
    """Return the processor seconds of one call in the whole process, and when it began and ended."""

    cpu: float
    start: float
    stop: float


def timed_rounds(work: Work, entries: tuple[Entry, ...], num_rounds: int) -> list[list[Timing | None]]:
    """Run rounds in which every entry has a turn, started together on all ranks; return times by round and entry."""
    alone = dist.get_world_size() == 1
    calls = [entry.make(work, *entry.args) if entry.layout or dist.get_rank() == 0 else None for entry in entries]
    _check(work, entries, calls)
    rounds: list[list[Timing | None]] = []
    for number in range(num_rounds):
        times: list[Timing | None] = [None] * len(entries)
        for at in _turns(len(entries), number):
            call = calls[at]
            if not alone:
                dist.barrier()
            if call is None:
                continue
            start, cpu = time.perf_counter(), time.process_time()
            call()
            times[at] = Timing(time.process_time() - cpu, start, time.perf_counter())
        rounds.append(times)
    return rounds


def _turns(count: int, number: int) -> list[int]:
    """Rotate the first entry with every round, so that no entry always follows the same one."""
    return [(number + i) % count for i in range(count)]


def _check(work: Work, entries: tuple[Entry, ...], calls: list[Call | None]) -> None:
    """Run every entry once, untimed, and compare its results with the bare kernel's."""
    wanted = bare(work)()
    for entry, call in zip(entries, calls, strict=True):
        if call is None:
            continue
        world_size = dist.get_world_size()
        layout = layout_of(work, entry.layout or "balanced", world_size if entry.layout else 1)
        for name, result, whole in zip(SHOWN, call(), wanted, strict=True):
            mine = layout.shard(whole, dist.get_rank() if entry.layout else 0, 2).float()
            error = ((result.float() - mine).norm() / mine.norm()).item()
            assert error < (1e-4 if work.dtype == "float32" else 2e-2), f"{entry.name}: {name} is off by {error:.1e}"
