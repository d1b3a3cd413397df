"""Measure tokens per second of a small transformer on long-tailed documents: one group of all ranks and static dp x cp.

    torchrun --nproc-per-node 4 -m benchmarks.batches_speed

Every step has the same documents in every split; splits take turns, and the median of each is printed, with its ratio
to the fastest static split. Forward, backward and the all-reduce of gradients are timed, with plans made before. Ranks
that share cores wait for each other's work less than ranks with cores of their own: ratios are smaller than there.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import longspan as ls
from longspan.planning.splits import static_layouts
from longspan.training import token_loss

VOCAB, DIM, HEADS, LAYERS = 64, 128, 4, 2
SIZES = {"q_heads": HEADS, "kv_heads": HEADS, "head_dim": DIM // HEADS, "dtype": "float32"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.qkv = nn.ModuleList(nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM)) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(LAYERS)
        )

    def forward(self, ids: Tensor, plan: Any, group: Any) -> Tensor:
        x = self.tokens(ids)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + mlp(ls.attention(q, k, v, plan, group=group).transpose(1, 2).flatten(2))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches_speed", description=str(__doc__).split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-per-rank", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(0)
    longest = 2 * args.tokens_per_rank
    lengths = np.clip(rng.lognormal(math.log(200), 1.5, 100 * args.steps), 16, longest).astype(int)
    batches = ls.batches(lengths, ranks=ranks, tokens_per_rank=args.tokens_per_rank)[: args.steps]
    torch.manual_seed(0)
    model = Model()

    # The plan, the group and the tokens of this rank, for each split and step
    splits: dict[str, list[tuple[Any, Any, Tensor]]] = {"one group": []}
    for step in batches:
        (micro,) = step
        ids = torch.randint(VOCAB, (1, int(micro.layout.num_tokens[rank])))
        splits["one group"].append((micro.plan(**SIZES), dist.group.WORLD, ids))
    for cp in (2, 4):
        if ranks % cp:
            continue
        groups = [dist.new_group(list(range(i, i + cp))) for i in range(0, ranks, cp)]
        parts: list[tuple[Any, Any, Tensor]] = []
        for step in batches:
            most = int(1.02 * cp * args.tokens_per_rank)
            found = list(static_layouts(step.micro_batches[0].lengths, ranks // cp, cp, most, "pairs"))
            if len(found) < len(groups):
                raise SystemExit(f"step {step.number} has too few documents for {ranks // cp} groups")
            documents, layout = found[rank // cp]
            plan = ls.plan(ls.masks.documents(documents) & ls.masks.causal(), layout, **SIZES)
            ids = torch.randint(VOCAB, (1, int(layout.num_tokens[rank % cp])))
            parts.append((plan, groups[rank // cp], ids))
        splits[f"{ranks // cp} x {cp}"] = parts

    def run(parts: list[tuple[Any, Any, Tensor]]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for (plan, group, ids), step in zip(parts, batches, strict=True):
            logits = model(ids, plan, group)
            loss = token_loss(logits, ids, group=dist.group.WORLD, gradients="sum", num_tokens=step.labels)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.zero_grad()
        dist.barrier()
        return time.perf_counter() - begin

    tokens = sum(int(micro.lengths.sum()) for step in batches for micro in step)
    seconds: dict[str, list[float]] = {name: [] for name in splits}
    for number in range(args.rounds + 1):
        for name, parts in splits.items():
            took = run(parts)
            if number:  # the first round records plans
                seconds[name].append(took)
    if rank == 0:
        fastest = min(median(took) for name, took in seconds.items() if name != "one group")
        for name, took in seconds.items():
            print(
                f"{name:10} {tokens / median(took):8,.0f} tokens/s   {fastest / median(took):.2f}x the fastest static"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
