"""Shared code of the example losses: a model, packed rollouts, training over ranks and in one process.

`train(loss, plain)` trains 20 steps over the ranks of torchrun with FSDP2 and `loss`, then on rank 0 alone with
`plain`, where every document runs by itself, without packing, masks or Longspan. Losses and gradient norms must agree.
"""

import copy
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import longspan as ls
from longspan.training import Batch, check_same, make_mesh, token_logprobs

SEQ_LEN, VOCAB, DIM, HEADS, LAYERS, STEPS, GROUPS, LIMIT = 96, 19, 16, 2, 2, 20, 4, 1e-5


class Scores(NamedTuple):
    """Outputs of a model at each position: log-probability of the label, entropy, value of the state, and logits."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    logits: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ_LEN, DIM)
        self.qkv = nn.ModuleList(nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM)) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in self.qkv)
        self.head, self.value = nn.Linear(DIM, VOCAB), nn.Linear(DIM, 1)

    def forward(self, ids, positions, labels, plan=None, group=None) -> Scores:
        """Run over ranks with a plan; without one, on whole documents with plain PyTorch."""
        x = self.tokens(ids) + self.places(positions)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            if plan is None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = ls.attention(q, k, v, plan, group=group)
            x = x + mlp(out.transpose(1, 2).flatten(2))
        logits, values = self.head(x), self.value(x).sum(-1)
        if plan is not None:  # a real model would not compute logits: see docs/rl.md
            outputs = *token_logprobs(x, labels, head=self.head), values, logits
            return Scores(*(y.clone() for y in outputs))  # FSDP2 warns of views
        logs = logits.log_softmax(-1)
        logprobs = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return Scores(logprobs, -(logs * logs.exp()).sum(-1), values, logits)


class Document(NamedTuple):
    """One response with its prompt. Position t of `scores` is for token t + 1; other tensors omit the first token."""

    scores: Scores
    response: Tensor
    """Whether each token after the first belongs to the response."""
    old: Tensor
    reference: Tensor
    reward: Tensor


@dataclass
class Rollout:
    """A packed row of documents with log-probabilities of sampler and reference model, (1, tokens), each value at the
    position of its token; and one reward per document."""

    lengths: list[int]
    ids: Tensor
    response: Tensor
    old: Tensor
    reference: Tensor
    rewards: Tensor

    @property
    def advantages(self) -> Tensor:
        """Rewards normalised within groups of four documents."""
        groups = self.rewards.view(-1, GROUPS)
        return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

    def batch(self):
        return {"input_ids": self.ids, "labels": self.ids, "loss_mask": self.response}

    def documents(self, model) -> list[Document]:
        """Run each document by itself."""
        parts = zip(
            *(x[0].split(self.lengths) for x in (self.ids, self.response, self.old, self.reference)), strict=True
        )
        return [
            Document(run_alone(model, ids), response[1:], old[1:], reference[1:], reward)
            for (ids, response, old, reference), reward in zip(parts, self.rewards, strict=True)
        ]


def run_alone(model, ids) -> Scores:
    """Return the outputs at all positions of one document but the last, without ranks and without packing."""
    scores = model(ids[None], torch.arange(len(ids))[None], ids.roll(-1)[None])
    return Scores(*(x[0, :-1] for x in scores))


def rollout(step, frozen) -> Rollout:
    """Return eight documents of random lengths that count up; the sampler is the frozen model with some noise."""
    draw = torch.Generator().manual_seed(step)
    lengths = (torch.rand(2 * GROUPS, generator=draw) * (SEQ_LEN / GROUPS / 2 - 4)).long() + 4
    lengths[-1] += SEQ_LEN - lengths.sum()
    ids = torch.cat([(torch.arange(n) * (i % 3 + 1) + step) % VOCAB for i, n in enumerate(lengths.tolist())])
    response = torch.cat([torch.arange(n) >= 1 + i % 3 for i, n in enumerate(lengths.tolist())])
    with torch.no_grad():
        runs = [run_alone(frozen, part).logprobs for part in ids.split(lengths.tolist())]
    reference = torch.cat([F.pad(run, (1, 0)) for run in runs])  # the first token of a document has none
    noise = torch.randn(SEQ_LEN, generator=draw)
    rewards = torch.randn(2 * GROUPS, generator=draw)
    return Rollout(lengths.tolist(), *(x[None] for x in (ids, response, reference + noise / 9, reference)), rewards)


@dataclass
class Step:
    """One rank's shard of a rollout."""

    data: Rollout
    mine: Batch
    plan: ls.Plan
    group: object

    @property
    def counts(self) -> Tensor:
        """Whether the label of each local position is a token of a response."""
        return self.mine["shift_labels"] != -100

    def run(self, model) -> Scores:
        mine = self.mine
        return model(mine["input_ids"], mine["position_ids"], mine["shift_labels"], self.plan, self.group)


def train_over_ranks(loss):
    """Return (loss, gradient norm) of every step, with FSDP2 over the ranks of the sequence."""
    mesh = make_mesh(cp=dist.get_world_size(), device_type="cpu")
    torch.manual_seed(0)
    model = Model()  # the same weights on every rank before sharding
    frozen = copy.deepcopy(model).requires_grad_(requires_grad=False)
    fully_shard(model, mesh=mesh.dp_cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = []
    for number in range(STEPS):
        data = rollout(number, frozen)
        check_same(data.batch(), mesh.cp)
        mask = ls.masks.documents(data.lengths) & ls.masks.causal()
        layout = ls.layouts.balanced(mask, world_size=mesh.cp.size())
        plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float32")
        mine = plan.shard(data.batch(), mesh.cp.get_local_rank(), documents=data.lengths, positions="document")
        value = loss(model, frozen, Step(data, mine, plan, mesh.cp))
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        result.append((value.item(), norm.item()))
    return result


def train_alone(plain):
    """Return the same in one process."""
    torch.manual_seed(0)
    model = Model()
    frozen = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = []
    for number in range(STEPS):
        value = plain(model, frozen, rollout(number, frozen))
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.append((value.item(), norm.item()))
    return result


def train(loss, plain):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = train_over_ranks(loss)
    dist.destroy_process_group()
    if rank:
        return
    expected = train_alone(plain)
    worst = [max(abs(a[i] - b[i]) for a, b in zip(result, expected, strict=True)) for i in range(2)]
    print(
        f"loss {expected[0][0]:.5f} to {expected[-1][0]:.5f}, gradient norm {expected[-1][1]:.5f} at the end;", end=" "
    )
    print(f"losses differ from one process by {worst[0]:.1e}, gradient norms by {worst[1]:.1e}")
    sys.exit(int(not max(worst) <= LIMIT))
