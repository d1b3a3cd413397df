"""What ranks do in the tests of tokens and sequences; importable by name, as worker processes need it."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import longspan as ls
from longspan.training import gather_tokens, make_mesh, per_sequence, per_token, shard_batch, shard_like
from tests.cases import LAYOUTS, random_layout, random_lengths


def make_case(seed, world):
    """Lengths per row, layout, whole values and which of them count; some seeds leave ranks without any."""
    rng = np.random.default_rng(seed)
    total, rows = int(rng.integers(1, 30)), int(rng.integers(1, 4))
    lengths = [random_lengths(rng, total) for _ in range(rows)]
    mask = (ls.masks.documents(lengths[0]) & ls.masks.causal()).resized(total)
    layout = random_layout(rng, LAYOUTS[seed % len(LAYOUTS)], mask, total, world)
    values, factors = (torch.as_tensor(rng.normal(size=(rows, total))) for _ in range(2))
    return lengths, layout, values, torch.as_tensor(rng.random((rows, total)) < 0.6), factors


def one_process(lengths, values, counts, factors):
    """The loss that ranks compute below, document by document."""
    total = values.new_zeros(())
    means, sums = [], []
    for row, parts in enumerate(lengths):
        pieces = (x[row].split(parts.tolist()) for x in (values, counts, factors))
        for value, count, factor in zip(*pieces, strict=True):
            kept = value[count]
            mean = kept.sum() / max(len(kept), 1)
            means.append(mean)
            sums.append((mean.exp() * value * factor).sum())
    total = torch.stack(sums).square().sum() + torch.stack(means).square().sum()
    return total + (values * factors).sum() ** 2


def losses(seeds, world):
    """For each seed the difference of the loss, and of the gradient after the trainer's reduction."""
    return [_loss(seed, world) for seed in seeds]


def _loss(seed, world):
    group, rank = dist.group.WORLD, dist.get_rank()
    lengths, layout, values, counts, factors = make_case(seed, world)
    gradients = ("sum", "average")[seed % 2]
    whole = values.clone().requires_grad_()
    expected = one_process(lengths, whole, counts, factors)
    expected.backward()
    mine = shard_batch({"labels": counts.long()}, layout, rank, documents=lengths, positions="document")
    own = shard_like(values, mine, shift=0).requires_grad_()
    kept, weights = shard_like(counts, mine, shift=0), shard_like(factors, mine, shift=0)
    options = {"gradients": gradients}
    means = per_sequence(own, mine, group, reduce="mean", mask=kept, **options)
    sums = per_sequence(per_token(means.exp(), mine, group, **options) * own * weights, mine, group, **options)
    loss = sums.square().sum() + means.square().sum()
    loss = loss + (gather_tokens(own, mine, group, **options) * factors).sum() ** 2
    loss.backward()
    found = gather_tokens(own.grad, layout, group) / (world if gradients == "average" else 1)
    assert torch.equal(gather_tokens(kept, mine, group), counts)
    off = float((loss - expected).detach().abs()) / (1 + expected.item())
    return off, float((found - whole.grad).abs().max()) / (1 + float(whole.grad.abs().max()))


def numbers_are_the_same_bits(seed, world):
    """This rank's numbers of sequences, in float32."""
    lengths, layout, values, _, _ = make_case(seed, world)
    own = layout.shard(values.float(), dist.get_rank(), 1)
    return per_sequence(own, layout, dist.group.WORLD, documents=lengths, reduce="mean").tolist()


def fsdp(world):
    """The gradient of a layer under FSDP2, which averages, of a loss of whole sequences; and that of one process."""
    torch.manual_seed(0)
    layer, alone = nn.Linear(4, 1, bias=False).double(), nn.Linear(4, 1, bias=False).double()
    alone.load_state_dict(layer.state_dict())
    x, layout = torch.randn(1, 11, 4, dtype=torch.float64), ls.layouts.striped(11, world)
    (alone(x)[..., 0].exp().sum().square() + alone(x)[0, :5, 0].mean().exp()).backward()
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    out = layer(layout.shard(x, dist.get_rank(), 1)).sum(-1)
    group = dist.group.WORLD
    whole = gather_tokens(out, layout, group, gradients="average")
    mean = per_sequence(out, layout, group, documents=[5, 6], reduce="mean", gradients="average")[0]
    (whole.exp().sum().square() + mean.exp()).backward()
    return float((layer.weight.grad.full_tensor() - alone.weight.grad).abs().max() / alone.weight.grad.abs().max())


class TakesBatch(nn.Module):
    """A model that is handed the batch as a whole."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 1), None

    def forward(self, batch):
        self.seen = batch
        return self.layer(batch["features"]).sum()


def batch_through_fsdp(world):
    """What a model under FSDP2 with mixed precision sees of a batch that it is handed whole: dtypes of its tensors."""
    torch.manual_seed(0)
    layout, model = ls.layouts.zigzag(4 * world, world), TakesBatch()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    batch = {"labels": torch.arange(4 * world), "features": torch.randn(4 * world, 4)}
    model(shard_batch(batch, layout, dist.get_rank(), dims={"features": 0})).backward()
    return {name: str(x.dtype) for name, x in model.seen.items()}


def data_parallel():
    """Two sequences at once, each over two ranks: the gradient of their mean loss, which FSDP2 makes of all four."""
    mesh = make_mesh(dp=2, cp=2, device_type="cpu")
    torch.manual_seed(0)
    layer, alone = nn.Linear(4, 1, bias=False).double(), nn.Linear(4, 1, bias=False).double()
    alone.load_state_dict(layer.state_dict())
    whole = [torch.randn(1, total, 4, dtype=torch.float64) for total in (9, 14)]
    documents = [[4, 5], [1, 6, 7]]
    for x, lengths in zip(whole, documents, strict=True):  # one mean over the five documents
        parts = alone(x)[0, :, 0].split(lengths)
        (torch.stack([part.mean().exp() for part in parts]).sum() / 5).backward()
    fully_shard(layer, mesh=mesh.dp_cp)
    here = mesh.dp.get_local_rank()
    x, layout = whole[here], ls.layouts.striped(whole[here].shape[1], 2)
    out = layer(layout.shard(x, mesh.cp.get_local_rank(), 1)).sum(-1)
    means = per_sequence(out, layout, mesh.cp, documents=documents[here], reduce="mean", gradients="average")
    (means.exp().sum() / (5 / 2)).backward()  # 5 documents over 2 data-parallel ranks
    return float((layer.weight.grad.full_tensor() - alone.weight.grad).abs().max() / alone.weight.grad.abs().max())


def another_layout(world):
    """What attention says of queries that another layout of equal lengths cut, and of those that its own did."""
    total = 8 * world
    mask, one, other = ls.masks.causal(total), ls.layouts.zigzag(total, world), ls.layouts.contiguous(total, world)
    plan = ls.plan(mask, one, q_heads=2, kv_heads=2, head_dim=4, dtype="float32")
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, total, 4) for _ in range(3)]
    q, k, v = (plan.shard(x, dist.get_rank(), dim=2) for x in whole)
    out = ls.attention(q, k, v, plan, group=dist.group.WORLD)
    error = float((out - one.shard(ls.attention(*whole, mask), dist.get_rank(), 2)).abs().max())
    try:
        ls.attention(*(other.shard(x, dist.get_rank(), 2) for x in whole), plan, group=dist.group.WORLD)
    except ls.PlanError as refusal:
        return error, str(refusal)
    return error, None
