"""Train on documents of very different lengths with FSDP2 and one group of all ranks: no degree to choose.

    torchrun --nproc-per-node 4 examples/long_tailed.py
    torchrun --nproc-per-node 4 examples/long_tailed.py --ranks-per-group 2  # documents are cut inside of groups only
    torchrun --nproc-per-node 4 examples/long_tailed.py --checkpoint DIR --stop-after 12  # again without: it resumes

Rank 0 repeats every step in one process, document by document, and prints by how much the losses differ.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import longspan as ls
from longspan.training import DocumentLoader, make_mesh, token_loss

VOCAB, DIM, HEADS, LAYERS = 32, 32, 4, 2
SIZES = {"q_heads": HEADS, "kv_heads": HEADS, "head_dim": DIM // HEADS, "dtype": "float32"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.qkv = nn.ModuleList(nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM)) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in self.qkv)

    def forward(self, ids, positions, what, **options):
        angles = positions[..., None] / 100 ** torch.linspace(0, 1, DIM, device=ids.device)
        x = self.tokens(ids) + angles.sin()
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + mlp(ls.attention(q, k, v, what, **options).transpose(1, 2).flatten(2))
        return self.head(x) / DIM**0.5


def make_documents(num=700):
    """Return documents that count up from a random start; most are short, few are long."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.5, 1.3, num).astype(int) + 2, 800)
    return [(np.arange(n) + rng.integers(VOCAB)) % VOCAB for n in lengths]


def repeat(model, optimizer, step, documents):
    """Return the loss of a step in one process."""
    total = 0.0
    for number in np.concatenate([micro.documents for micro in step]):
        ids = torch.from_numpy(documents[number])[None]
        logits = model(ids, torch.arange(ids.shape[1])[None], ls.masks.causal())
        loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / step.labels
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--ranks-per-group", type=int, help="default: all ranks are one group")
    parser.add_argument("--stop-after", type=int, metavar="STEPS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(ranks=world, cp=args.ranks_per_group, device_type="cpu")
    place, size = mesh.cp.get_local_rank(), mesh.cp.size()
    documents = make_documents()
    limits = {"tokens_per_rank": 800 // size, "tokens_per_step": 1600}  # the longest document has 800 tokens
    batches = ls.batches([len(x) for x in documents], ranks=world, ranks_per_group=size, **limits)
    loader = DocumentLoader(documents, batches, rank, prepare=lambda micro: micro.plan(**SIZES).prepare(place, "cpu"))

    torch.manual_seed(0)
    model, alone = Model(), Model()
    alone.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh.dp_cp)
    optimizer, other = (torch.optim.AdamW(part.parameters(), lr=3e-3) for part in (model, alone))
    if args.checkpoint is not None and args.checkpoint.exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "loader": loader.state_dict()}
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state["loader"])
    is_whole = loader.num_steps == 0  # a resumed run is not repeated in one process

    total, worst = 0.0, 0.0
    for step, micro, batch in loader:
        logits = model(batch["input_ids"], batch["position_ids"], micro.plan(**SIZES), group=mesh.cp)
        loss = token_loss(
            logits, batch["shift_labels"], group=mesh.dp_cp, gradients="average", num_tokens=step.labels
        )  # the mean over all labels of the step; FSDP averages gradients
        loss.backward()
        total += loss.item()
        if micro is not step.micro_batches[-1]:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step.number}: {len(step)} micro-batches, {step.labels} labels, loss {total!r}")
            if is_whole:
                worst = max(worst, abs(repeat(alone, other, batches[step.number], documents) - total))
        total = 0.0
        if step.number + 1 == args.stop_after:
            break
    if args.checkpoint is not None and args.stop_after is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "loader": loader.state_dict()}
        dcp.save(state, checkpoint_id=args.checkpoint)
    elif rank == 0 and is_whole:
        print(f"losses of {len(batches)} steps differ from one process {worst:.1e}")
    dist.destroy_process_group()
