"""Run by torchrun: plans come from the workers of a DataLoader; attention is compared with dense float64."""

import copy

import numpy as np
import torch
import torch.distributed as dist

import longspan as ls
from longspan.testing import dense_gradients

SCHEMES = ["ring", "exchange", "all_gather", "staged", "all_to_all", "hybrid(2,ring)", "auto", "auto", "auto", "auto"]
TOKENS, WORLD, BATCHES = 120, 2, 30


def every_third(b, h, q, kv):
    return (kv <= q) & ((q - kv) % 3 == 0)


def make_mask(number):
    edges = np.sort(np.random.default_rng(number).integers(0, TOKENS, 4))
    documents = ls.masks.documents(np.diff([0, *edges, TOKENS]).tolist()) & ls.masks.causal()
    if number % 3 == 0:
        return documents
    if number % 3 == 1:
        return documents & ls.masks.from_mask_mod(every_third, TOKENS)
    return ls.masks.per_head(documents, *[documents & ls.masks.sliding_window(n) for n in (4, 30, 30)])


def collate(samples):
    (number,) = samples
    mask, scheme = make_mask(number), SCHEMES[number % len(SCHEMES)]
    layout = ls.layouts.balanced(mask, world_size=WORLD)
    return number, ls.plan(mask, layout, q_heads=4, kv_heads=2, head_dim=8, dtype="float64", scheme=scheme)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for number, plan in torch.utils.data.DataLoader(range(BATCHES), 1, collate_fn=collate, num_workers=2):
        draw = torch.Generator().manual_seed(number)
        q, dout = torch.randn(2, 1, 4, TOKENS, 8, generator=draw, dtype=torch.float64)
        k, v = torch.randn(2, 1, 2, TOKENS, 8, generator=draw, dtype=torch.float64)
        expected, _, *expected_gradients = dense_gradients(q, k, v, make_mask(number), 8**-0.5, dout)
        for used in (plan, copy.deepcopy(plan)):
            mine = [plan.shard(x, rank, dim=2).requires_grad_() for x in (q, k, v)]
            out = ls.attention(*mine, used, group=dist.group.WORLD)
            gradients = torch.autograd.grad(out, mine, plan.shard(dout, rank, dim=2))
            for found, whole in zip((out, *gradients), (expected, *expected_gradients), strict=True):
                torch.testing.assert_close(found, plan.shard(whole, rank, dim=2), rtol=0, atol=1e-12)
        print(f"rank {rank} batch {number} {plan.scheme.name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
