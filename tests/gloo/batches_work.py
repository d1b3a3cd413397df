"""What ranks do in tests/gloo/test_batches.py; importable by name, as worker processes need it."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import longspan as ls

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM = 17, 8, 2, 1, 4


def _parameters():
    torch.manual_seed(0)
    shapes = {
        "embed": (VOCABULARY, WIDTH), "q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM),
        "v": (WIDTH, KV_HEADS * DIM), "out": (HEADS * DIM, WIDTH), "head": (WIDTH, VOCABULARY),
    }  # fmt: skip
    return {name: torch.randn(*shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}


def _heads(x, weight):
    return (x @ weight).unflatten(-1, (-1, DIM)).transpose(0, 1)[None]


def _loss(parameters, ids, labels, attend):
    """The sum of the losses of the labels, of one attention layer with a residual connection."""
    x = parameters["embed"][ids]
    mixed = attend(*(_heads(x, parameters[name]) for name in "qkv"))
    x = x + mixed[0].transpose(0, 1).flatten(1) @ parameters["out"]
    return F.cross_entropy(x @ parameters["head"], labels, reduction="sum", ignore_index=-100)


def _dense(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _epoch(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.5, 1.0, size=rng.integers(3, 24)), 1, 150).astype(np.int64)
    tokens = [torch.from_numpy(rng.integers(0, VOCABULARY, size=n)) for n in lengths]
    limit = int(rng.integers(8, 40))
    steps = ls.batches(
        lengths, ranks=dist.get_world_size(), tokens_per_rank=limit,
        tokens_per_step=int(rng.integers(2, 7)) * limit * 2, seed=seed, too_long="cut", ranks_per_node=2,
    )  # fmt: skip
    return tokens, steps


def _reference(step, tokens):
    """Gradients of the step's mean loss, computed document by document on one device."""
    parameters = _parameters()
    for micro in step:
        rows = zip(micro.documents.tolist(), micro.starts.tolist(), micro.lengths.tolist(), strict=True)
        for document, start, length in rows:
            ids = tokens[document][start : start + length]
            if length > 1:
                labels = torch.cat((ids[1:], torch.tensor([-100])))
                (_loss(parameters, ids, labels, _dense) / step.labels).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters.values()]


def train(first, count, mistake=""):
    """The largest error of a gradient over `count` steps, relative to the gradient's largest value."""
    rank, worst, seed, done = dist.get_rank(), 0.0, first, 0
    while done < count:
        tokens, steps = _epoch(seed)
        seed += 1
        for step in steps[: count - done]:
            done += 1
            if not step.labels:
                continue
            parameters = _parameters()
            for micro in step:
                if not micro.labels:
                    continue
                plan = micro.plan(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="float64", scheme="exchange")
                rows = zip(micro.documents.tolist(), micro.starts.tolist(), micro.lengths.tolist(), strict=True)
                ids = torch.cat([tokens[d][start : start + length] for d, start, length in rows])
                part = plan.shard(
                    {"input_ids": ids, "labels": ids}, rank, documents=micro.lengths.tolist(), positions="document"
                )
                loss = _loss(
                    parameters,
                    part["input_ids"],
                    part["shift_labels"],
                    lambda q, k, v, p=plan: ls.attention(q, k, v, p, group=dist.group.WORLD),
                )
                weight = 1 / len(step) if mistake == "weight" else micro.weight
                (loss / micro.labels * weight).backward()
            for p, expected in zip(parameters.values(), _reference(step, tokens), strict=True):
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                worst = max(worst, float((grad - expected).abs().max() / expected.abs().max().clamp(min=1e-3)))
    return worst
