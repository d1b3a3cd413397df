"""What ranks do in tests/gloo/test_batches.py; importable by name, as worker processes need it."""

import functools
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import longspan as ls
from longspan.planning.batches import BatchStep
from longspan.training import DocumentLoader, make_mesh

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, TAPS = 17, 8, 2, 1, 4, 3


def _parameters():
    torch.manual_seed(0)
    shapes = {
        "embed": (VOCABULARY, WIDTH), "q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM),
        "v": (WIDTH, KV_HEADS * DIM), "out": (HEADS * DIM, WIDTH), "head": (WIDTH, VOCABULARY),
        "taps": (WIDTH, TAPS), "state": (WIDTH, HEADS * (3 * DIM + 2)), "back": (HEADS * DIM, WIDTH),
    }  # fmt: skip
    return {name: torch.randn(*shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}


def _loss(parameters, ids, labels, mixers):
    """The sum of the losses of the labels, of a layer with attention and one with a convolution and the delta rule."""
    attend, convolve, recur = mixers
    x = parameters["embed"][ids]
    q, k, v = ((x @ parameters[name]).unflatten(-1, (-1, DIM)).transpose(0, 1)[None] for name in "qkv")
    x = x + attend(q, k, v)[0].transpose(0, 1).flatten(1) @ parameters["out"]
    mixed = convolve(x[None] / 4, parameters["taps"]) @ parameters["state"]
    q, k, v, g, beta = mixed.unflatten(-1, (HEADS, -1)).split((DIM, DIM, DIM, 1, 1), dim=-1)
    k = F.normalize(k, dim=-1)
    x = x + recur(q, k, v, F.logsigmoid(g[..., 0]), beta[..., 0].sigmoid()).flatten(2)[0] @ parameters["back"]
    return F.cross_entropy(x @ parameters["head"] / 4, labels, reduction="sum", ignore_index=-100)


def _attend_alone(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _convolve_alone(x, taps):
    return F.conv1d(F.pad(x.mT, (TAPS - 1, 0)), taps[:, None], groups=WIDTH).mT


def _recur_alone(q, k, v, g, beta):
    state, out = q.new_zeros(HEADS, DIM, DIM), []
    for t in range(q.shape[1]):
        state = state * g[0, t, :, None, None].exp()
        wrong = v[0, t] - (k[0, t, :, None] @ state)[:, 0]
        state = state + k[0, t, :, :, None] * (beta[0, t, :, None] * wrong)[:, None]
        out.append((q[0, t, :, None] @ state)[:, 0] / DIM**0.5)
    return torch.stack(out)[None]


ALONE = _attend_alone, _convolve_alone, _recur_alone


def _over_ranks(micro, group):
    lengths, one = micro.lengths.tolist(), torch.float64
    plan = micro.plan(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scheme="exchange", dtype=one)
    taps = ls.conv_plan(lengths, micro.layout, channels=WIDTH, width=TAPS, dtype=one)
    states = ls.scan_plan(lengths, micro.layout, heads=HEADS, keys=DIM, values=DIM, maps="matrix", dtype=one)
    return (
        lambda q, k, v: ls.attention(q, k, v, plan, group=group),
        lambda x, weight: ls.causal_conv1d(x, weight, plan=taps, group=group),
        lambda *tensors: ls.gated_delta_rule(*tensors, plan=states, group=group),
    )


@functools.cache
def _group(ranks_per_group):
    return make_mesh(ranks=dist.get_world_size(), cp=ranks_per_group, device_type="cpu").cp


def _epoch(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.5, 1.0, size=rng.integers(3, 24)), 1, 150).astype(np.int64)
    tokens = [torch.from_numpy(rng.integers(0, VOCABULARY, size=n)) for n in lengths]
    limit, ranks = int(rng.integers(8, 40)), dist.get_world_size()
    steps = ls.batches(
        lengths, ranks=ranks, tokens_per_rank=limit, ranks_per_group=(ranks, ranks, 2, 1)[seed % 4],
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
                (_loss(parameters, ids, labels, ALONE) / step.labels).backward()
    return [p.grad for p in parameters.values()]


def _mistaken(step, rank, mistake, right=BatchStep.of_rank):
    """The step of a rank's group with a mistake in its first micro-batch."""
    if mistake == "group":
        return right(step, 0)
    first, *rest = right(step, rank)
    rows, weight = np.arange(len(first.documents)), first.weight
    match mistake:
        case "lost":
            rows = rows[1:]
        case "doubled":
            rows = np.append(rows, rows[:1])
        case "weight":
            weight = 1 / len(step)
    parts = {name: getattr(first, name)[rows] for name in ("documents", "starts", "lengths")}
    return replace(step, micro_batches=(replace(first, weight=weight, **parts), *rest))


def train(first, count, mistake=""):
    """The largest error of a gradient over `count` steps, relative to the gradient's largest value."""
    with mock.patch.object(BatchStep, "of_rank", functools.partialmethod(_mistaken, mistake=mistake)):
        return _train(first, count)


def _train(first, count):
    rank, worst, seed, done = dist.get_rank(), 0.0, first, 0
    while done < count:
        tokens, steps = _epoch(seed)
        seed += 1
        group, parameters = _group(steps.ranks_per_group), _parameters()
        for step, micro, batch in DocumentLoader(tokens, steps[: count - done], rank):
            loss = _loss(parameters, batch["input_ids"][0], batch["shift_labels"][0], _over_ranks(micro, group))
            (loss / max(micro.labels, 1) * micro.weight).backward()
            if micro is not step.micro_batches[-1]:
                continue
            done += 1
            for p in parameters.values():
                dist.all_reduce(p.grad)
            if rank == 0 and step.labels:
                for p, expected in zip(parameters.values(), _reference(steps[step.number], tokens), strict=True):
                    worst = max(worst, float((p.grad - expected).abs().max() / expected.abs().max().clamp(min=1e-3)))
            parameters = _parameters()
    return worst
