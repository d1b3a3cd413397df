"""How fast kernels, copies and links are here, with all ranks at work at once, as they are in a step.

Ranks that share cores slow each other down, also while this is measured, so the resulting machine is right for this
many ranks on this many cores. Every figure is the median of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.cli.launch import JobRanks
from longspan.execution.kernels import choose_kernel, kernel_named
from longspan.execution.kernels.contract import TileWork, Upstream
from longspan.execution.tile import Tile
from longspan.masks.bands import LIMIT
from longspan.schedules.cost.machine import Machine, tile_work
from longspan.schedules.steps import Sizes

Tiles = tuple[tuple[int, int, bool], ...]
TILES: Tiles = (  # query rows, key rows, causal
    (1024, 1024, True),
    (512, 1024, False),
    (256, 2048, False),
    (768, 768, True),
)
GPU_TILES: Tiles = ((16384, 16384, True), (8192, 16384, False), (4096, 32768, False), (12288, 12288, True))
"""Enough to fill all multiprocessors many times over."""
SMALL = 64
"""Query rows, one key: next to nothing to compute, so what is left is the call."""
MESSAGES = (1 << 16, 1 << 20, 1 << 22)


@dataclass(frozen=True)
class Kernels:
    """Seconds of one tile, forward and backward, by (query rows, key rows, causal)."""

    name: str
    forward: dict[tuple[int, int, bool], float]
    backward: dict[tuple[int, int, bool], float]


def median_seconds(ranks: JobRanks, act: Callable[[], object], rounds: int, together: int = 1) -> float:
    """Seconds of one act in the median round, which has `together` of them in a row; all ranks begin a round
    together."""
    act()  # to warm up; the barrier waits for it
    seconds: list[float] = []
    for _ in range(rounds):
        ranks.barrier()
        begin = time.perf_counter()
        for _ in range(together):
            act()
        ranks.finish()
        seconds.append((time.perf_counter() - begin) / together)
    return float(np.median(seconds))


def tiles_on(device: str) -> Tiles:
    return TILES if device == "cpu" else GPU_TILES


class Tensors:
    """q, k, v and an output's gradient for kernels to work on."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
        self.sizes, self.tiles = sizes, tiles_on(device)
        most_q, most_k = (max(tile[i] for tile in self.tiles) for i in (0, 1))

        def drawn(heads: int, rows: int, dim: int) -> Tensor:
            return torch.randn(1, heads, rows, dim).to(device, dtype)

        self.q, self.dout = drawn(sizes.q_heads, most_q, sizes.head_dim), drawn(sizes.q_heads, most_q, sizes.v_head_dim)
        self.k, self.v = drawn(sizes.kv_heads, most_k, sizes.head_dim), drawn(sizes.kv_heads, most_k, sizes.v_head_dim)
        self.kernel = kernel_named(choose_kernel("auto", self.q, self.k, self.v))

    def passes(self, q_rows: int, k_rows: int, causal: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        """A forward and a backward of one tile."""
        q, k, v, dout = self.q[:, :, :q_rows], self.k[:, :, :k_rows], self.v[:, :, :k_rows], self.dout[:, :, :q_rows]
        tiles, scale = [Tile(0, q_rows, 0, k_rows, lo=0 if causal else None)], q.shape[-1] ** -0.5
        work = TileWork(q, k, v, tiles, scale)
        ((out, lse),) = list(self.kernel.forward(work))
        out = out.to(q.dtype)
        upstream = Upstream(dout, out, lse, (dout.float() * out.float()).sum(-1))
        return lambda: list(self.kernel.forward(work)), lambda: list(self.kernel.backward(work, upstream))


def kernel_times(ranks: JobRanks, tensors: Tensors, rounds: int, advance: Callable[[str], None]) -> Kernels:
    """Seconds of every tile, and of one with next to nothing in it."""
    seconds: tuple[dict[tuple[int, int, bool], float], ...] = {}, {}
    for tile in (*tensors.tiles, (SMALL, 1, False)):
        advance(f"kernel, {tile[0]} x {tile[1]}")
        for direction, act in zip(seconds, tensors.passes(*tile), strict=True):
            direction[tile] = ranks.most(median_seconds(ranks, act, rounds, 20 if tile[1] == 1 else 1))
    return Kernels(tensors.kernel.name, *seconds)


def kernel_rate(times: dict[tuple[int, int, bool], float], sizes: Sizes, base: Machine, direction: str) -> float:
    """FLOP per second, counted as the model of `base` counts them, without the time that a call costs anyway."""
    call = times[SMALL, 1, False]
    work = spent = 0.0
    for q_rows, k_rows, causal in times.keys() - {(SMALL, 1, False)}:
        band = np.array([[0, q_rows, 0, k_rows, 0 if causal else -LIMIT, LIMIT]], dtype=np.int64)
        dims = sizes.head_dim + sizes.v_head_dim
        work += tile_work(band, sizes.q_heads, sizes.kv_heads, dims, base, direction).flop
        spent += max(times[q_rows, k_rows, causal] - call, 0.1 * times[q_rows, k_rows, causal])
    return work / spent


def copy_rate(ranks: JobRanks, rounds: int) -> float:
    """Bytes per second of adding float32 rows to others, which is how partial results meet: read, read, written."""
    a, b = torch.randn(2, 1 << (20 if ranks.device == "cpu" else 26), device=ranks.device)  # beyond a GPU's caches
    took = median_seconds(ranks, lambda: a.add_(b), rounds, 4)
    return 12.0 * a.numel() / ranks.most(took)


@dataclass(frozen=True, slots=True)
class Wire:
    """What a message costs: seconds per message, and seconds per byte."""

    latency: float
    bandwidth: float


def wire(ranks: JobRanks, hop: int, rounds: int, advance: Callable[[str], None]) -> Wire:
    """All ranks send to the rank `hop` places on, at once, as they do in a step."""
    took: list[float] = []
    for size in MESSAGES:
        advance(f"link, {size >> 10} KiB")
        outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8, device=ranks.device)

        def act(outgoing: Tensor = outgoing, incoming: Tensor = incoming) -> None:
            ends = ((dist.isend, outgoing, ranks.rank + hop), (dist.irecv, incoming, ranks.rank - hop))
            for work in dist.batch_isend_irecv([dist.P2POp(kind, t, peer % ranks.size) for kind, t, peer in ends]):
                work.wait()

        took.append(ranks.most(median_seconds(ranks, act, rounds, max(1, (1 << 20) // size))))
    slope = max((took[-1] - took[0]) / (MESSAGES[-1] - MESSAGES[0]), 1e-12)
    return Wire(max(took[0] - slope * MESSAGES[0], 0.0), 1 / slope)
