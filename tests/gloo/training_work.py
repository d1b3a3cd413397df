"""What ranks do in the training tests; importable by name, as worker processes need it."""

from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import longspan as ls
from longspan.training import check_same, gather_outputs, make_mesh, relayout, shard_batch, token_loss
from tests.cases import LAYOUTS, random_layout, random_lengths

VOCAB, HEADS, DIM, BATCH = 11, 2, 4, 2


class Model(torch.nn.Module):
    """One layer of everything that mixes tokens or does not; `attend` is the only part that knows about ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(VOCAB, HEADS * DIM), torch.nn.Embedding(128, HEADS * DIM)
        self.qkv, self.head = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM), torch.nn.Linear(HEADS * DIM, VOCAB)

    def forward(self, ids, positions, attend):
        x = self.embed(ids) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return self.head(x + attend(q, k, v).transpose(1, 2).flatten(2))


def make_case(seed, world):
    """Lengths, mask, layout and batch of a seed: labels are uneven, and some seeds leave whole ranks without any."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(world, 60))
    lengths = random_lengths(rng, total)
    mask = (ls.masks.documents(lengths) & ls.masks.causal()).resized(total)
    layout = random_layout(rng, LAYOUTS[seed % len(LAYOUTS)], mask, total, world)
    ids = torch.as_tensor(rng.integers(0, VOCAB, size=(BATCH, total)))
    kept = rng.random((BATCH, total)) < rng.choice([0.1, 0.5, 1.0])
    if seed % 3 == 0:  # labels on one rank's tokens alone: all others have none, or next to none
        kept[:, layout.owner(np.arange(total)) != seed % world] = False
    if seed % 11 == 5:
        kept[:] = False
    return lengths, mask, layout, {"input_ids": ids, "labels": ids, "loss_mask": torch.as_tensor(kept)}


def one_process(model, lengths, mask, batch, num_shifts):
    """Loss and gradients by PyTorch alone on whole sequences, with its own shift of labels, token by token."""
    total = batch["labels"].shape[1]
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    positions = torch.as_tensor(np.arange(total) - starts[owner]).expand(BATCH, total)
    dense = torch.as_tensor(mask.allows(np.arange(total)[:, None], np.arange(total)))
    logits = model(
        batch["input_ids"], positions, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    )
    losses = []
    for shift in range(1, num_shifts + 1):
        terms = [
            F.cross_entropy(logits[b, i], batch["labels"][b, i + shift])
            for b in range(BATCH)
            for i in range(total - shift)
            if owner[i] == owner[i + shift] and batch["loss_mask"][b, i + shift]
        ]
        losses.append(torch.stack(terms).mean() if terms else logits.sum() * 0)
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach()


def losses(seeds, world):
    """For each seed: (difference of loss, of gradients, labels here, loss on this rank)."""
    torch.set_default_dtype(torch.float64)
    try:
        return [_loss(seed, world) for seed in seeds]
    finally:
        torch.set_default_dtype(torch.float32)


def _loss(seed, world):
    group, rank = dist.group.WORLD, dist.get_rank()
    lengths, mask, layout, batch = make_case(seed, world)
    gradients, num_shifts = ("sum", "average")[seed % 2], 1 + seed % 3
    torch.manual_seed(seed)
    model, whole = Model(), Model()
    whole.load_state_dict(model.state_dict())
    expected = one_process(whole, lengths, mask, batch, num_shifts)
    plan = ls.plan(
        mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, batch=BATCH, dtype="float64", scheme="exchange"
    )
    check_same(batch, group)
    mine = shard_batch(batch, layout, rank, documents=lengths, positions="document", num_shifts=num_shifts)
    logits = model(mine["input_ids"], mine["position_ids"], lambda q, k, v: ls.attention(q, k, v, plan, group=group))
    labels = [mine["shift_labels"], *(mine[f"shift_labels_{n}"] for n in range(2, num_shifts + 1))]
    loss = torch.stack([token_loss(logits, one, group=group, gradients=gradients) for one in labels]).sum()
    loss.backward()
    worst = 0.0
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        parameter.grad /= world if gradients == "average" else 1
        worst = max(worst, float((parameter.grad - other.grad).abs().max()))
    return float((loss.detach() - expected).abs()), worst, int((mine["shift_labels"] != -100).sum()), float(loss)


def accumulated():
    """Gradients of two micro-batches with `num_tokens`, against one batch; and the sum reduction."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    x, labels = torch.randn(2, 12, 5, dtype=torch.float64), torch.randint(0, 5, (2, 12))
    labels[0, :9] = -100
    whole = x.clone().requires_grad_()
    F.cross_entropy(whole.flatten(0, 1), labels.flatten()).backward()
    layout = ls.layouts.contiguous(12, world)
    parts = [layout.shard(t, rank).requires_grad_() for t in x]
    total = int((labels != -100).sum())
    for part, own in zip(parts, labels, strict=True):
        token_loss(part, layout.shard(own, rank), group=group, gradients="sum", num_tokens=total).backward()
    error = max(float((p.grad - layout.shard(g, rank)).abs().max()) for p, g in zip(parts, whole.grad, strict=True))
    summed = [
        token_loss(p, layout.shard(o, rank), group=group, gradients="sum", reduction="sum")
        for p, o in zip(parts, labels, strict=True)
    ]
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
    return error, float((sum(summed) - expected).detach().abs())


def trainer(how):
    """The largest difference of gradients, sinks included, from one process with both samples: two data-parallel ranks
    of two sequence ranks each, reduced by PyTorch's own DDP or by a sum."""
    mesh, rank = make_mesh(dp=2, cp=2, device_type="cpu"), dist.get_rank()
    mask = ls.masks.documents([9, 12]) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=2)
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (2, 21), generator=draw)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][1, 4:] = -100
    model, whole = Sinks(), Sinks()
    whole.load_state_dict(model.state_dict())
    alone = shard_batch(batch, ls.layouts.contiguous(21, 1), 0, documents=mask, positions="document")
    logits = whole(alone["input_ids"], alone["position_ids"], mask)
    token_loss(logits, alone["shift_labels"], group=None, gradients="sum").backward()

    sample = mesh.dp.get_local_rank()
    own = {name: value[sample : sample + 1] for name, value in batch.items()}
    check_same(own, mesh.cp)
    others = message(lambda: check_same(own, mesh.dp_cp))
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, dtype="float64", scheme="exchange")
    mine = shard_batch(own, layout, mesh.cp.get_local_rank(), documents=mask, positions="document")
    wrapped, gradients = model, "sum"
    if how == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.dp_cp.get_group())
        gradients = "average"
    logits = wrapped(mine["input_ids"], mine["position_ids"], plan, group=mesh.cp, captured_grads="share")
    token_loss(logits, mine["shift_labels"], group=mesh.dp_cp, gradients=gradients).backward()
    if how == "sum":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.dp_cp.get_group())
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs), others, rank


class Sinks(torch.nn.Module):
    """The model above with a learned sink per head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.model, self.sinks = Model().double(), torch.nn.Parameter(torch.randn(HEADS, dtype=torch.float64))

    def forward(self, ids, positions, what, **options):
        return self.model(ids, positions, lambda q, k, v: ls.attention(q, k, v, what, sinks=self.sinks, **options))


def relayouts(seeds, world):
    """Rows and gradients that moved between random layouts, and what was gathered, against whole tensors."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        total = int(rng.integers(0 if seed % 7 == 0 else 1, 40))
        mask = ls.masks.causal(total)
        source, target = (
            random_layout(rng, LAYOUTS[kind % len(LAYOUTS)], mask, max(total, 0), world)
            for kind in (seed, seed // len(LAYOUTS) + 3 * seed)
        )
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(2, total, 3, generator=draw, dtype=torch.float64)
        weight = torch.randn(2, total, 3, generator=draw, dtype=torch.float64)
        mine = source.shard(x, rank, 1, fill=7.0).requires_grad_()
        moved = relayout(mine, source, target, group, -2)
        assert torch.equal(moved, target.shard(x, rank, 1))
        (moved * target.shard(weight, rank, 1)).sum().backward()
        assert torch.equal(mine.grad, source.shard(weight, rank, 1))
        with torch.no_grad():
            assert torch.equal(gather_outputs(moved, target, group, 1), x)
            one = gather_outputs(mine.detach(), source, group, -2, to=world - 1)
            assert (one is None) if rank != world - 1 else torch.equal(one, x)
    return len(seeds)


def moved_bytes():
    """Rows that relayout sends, counted where they are sent."""
    source, target = ls.layouts.zigzag(16, 2), ls.layouts.contiguous(16, 2)
    sent = []
    whole = dist.all_to_all_single

    def counting(out, given, *args, **kwargs):
        sent.append(given.shape[0])
        return whole(out, given, *args, **kwargs)

    dist.all_to_all_single = counting
    try:
        relayout(source.shard(torch.arange(16.0), dist.get_rank()), source, target, dist.group.WORLD, 0)
    finally:
        dist.all_to_all_single = whole
    return sent


def message(call):
    try:
        call()
    except ls.LongspanError as error:
        return str(error)
    return "not refused"


def differing():
    """Messages of check_same for batches that differ in values, keys, shapes or types."""
    group, rank = dist.group.WORLD, dist.get_rank()
    ids = torch.arange(6)
    same = {"input_ids": ids, "name": "a", "sizes": [1, (2, 3.5)], "flag": torch.tensor(True), "none": torch.empty(0)}
    check_same(same, group)
    check_same({}, group)
    late = rank == dist.get_world_size() - 1
    changed = ids.clone()
    changed[-1] += late
    long, zeros = "k" * 70, torch.zeros(6, dtype=torch.int64)  # zeros of eight bytes are the same bytes
    return {
        "values": message(lambda: check_same({**same, "input_ids": changed}, group)),
        "keys": message(lambda: check_same({**same, **({} if late else {"extra": ids})}, group)),
        "shape": message(lambda: check_same({"x": ids.view(2, 3) if late else ids}, group)),
        "dtype": message(lambda: check_same({"x": zeros.double() if late else zeros}, group)),
        "long": message(lambda: check_same({long: int(late)}, group)),
        "object": message(lambda: check_same({"x": object() if late else 1}, group)),
    }


def refusals():
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    layout = ls.layouts.zigzag(8, world)
    x = torch.zeros(8 // world, 3, requires_grad=True)
    labels = torch.zeros(8 // world, dtype=torch.int64)
    mesh = make_mesh(cp=world, device_type="cpu")
    assert (mesh.dp_cp.size(), mesh.cp.size(), mesh.cp.get_local_rank()) == (world, world, rank)
    assert float(token_loss(x, labels, group=mesh.dp_cp, gradients="average")) > 0
    return {
        "mesh": message(lambda: make_mesh(dp=3, device_type="cpu")),
        "axes": message(lambda: relayout(x, layout, layout, mesh.whole, 0)),
        "grad": message(lambda: gather_outputs(x, layout, mesh.cp, 0)),
        "slots": message(lambda: relayout(x[1:], layout, ls.layouts.striped(8, world), group, 0)),
        "size": message(lambda: relayout(x, layout, ls.layouts.striped(9, world), group, 0)),
        "group": message(lambda: relayout(x, *[ls.layouts.striped(8, world + 1)] * 2, group, 0)),
        "to": message(lambda: gather_outputs(x.detach(), layout, group, 0, to=world)),
        "none": message(lambda: check_same({}, None)),
    }


def device_of_mesh():
    """Where a mesh is by default, on a host without a GPU, with a PyTorch that was built for CUDA."""

    def accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    with mock.patch.object(torch.accelerator, "current_accelerator", accelerator):
        return make_mesh(cp=dist.get_world_size()).cp.device_type
