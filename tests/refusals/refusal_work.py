"""What two ranks do for the table of refusals; importable by name, as worker processes need it."""

import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import longspan as ls
from longspan.torch_api import api as torch_api
from longspan.training import check_same, gather_outputs, relayout, token_loss

TOKENS, CLASSES = 21, 6


def whole(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def far(a, b):
    return float((a - b).abs().max())


def trained(labels, layout):
    """Errors of loss and gradient of a linear model, each rank with its part, against one process with all."""
    x, weight = whole(1, TOKENS, 5), whole(5, CLASSES, seed=1)
    one, mine = (weight.clone().requires_grad_() for _ in range(2))
    right = F.cross_entropy((x @ one)[0], labels[0])
    right.backward()
    rank, group = dist.get_rank(), dist.group.WORLD
    loss = token_loss(layout.shard(x, rank, 1) @ mine, layout.shard(labels, rank, 1), group=group, gradients="average")
    loss.backward()
    dist.all_reduce(mine.grad)
    return max(far(loss, right), far(mine.grad / dist.get_world_size(), one.grad))


def losses_on_any_number_of_ranks():
    """Ranks have very different numbers of labels."""
    labels = torch.randint(0, CLASSES, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    labels[0, :9] = -100
    return trained(labels, ls.layouts.contiguous(TOKENS, dist.get_world_size()))


def ranks_without_labels():
    labels = torch.full((1, TOKENS), -100)
    labels[0, -3:] = 2
    return trained(labels, ls.layouts.contiguous(TOKENS, dist.get_world_size()))


def garbage_in_padding():
    """Slots that are padding hold NaN, in q, k, v and the gradient of the output."""
    layout = ls.layouts.zigzag(TOKENS, dist.get_world_size(), equal_tokens=True)
    rank = dist.get_rank()
    mask = ls.masks.documents([4, 17]) & ls.masks.causal()
    tensors = [whole(1, 2, TOKENS, 8, seed=n) for n in range(4)]
    one = [t.clone().requires_grad_() for t in tensors[:3]]
    right = ls.attention(*one, mask)
    right.backward(tensors[3])
    *mine, dout = (layout.shard(t, rank, 2, fill=torch.nan) for t in tensors)
    mine = [t.requires_grad_() for t in mine]
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float64", scheme="exchange")
    out = ls.attention(*mine, plan, group=dist.group.WORLD)
    out.backward(dout)
    real = int(layout.num_tokens[rank])
    found = [out.detach(), *(t.grad for t in mine)]
    wanted = [right.detach(), *(t.grad for t in one)]
    pairs = zip(found, wanted, strict=True)
    return max(far(a[:, :, :real], layout.shard(b, rank, 2)[:, :, :real]) for a, b in pairs)


def predictions_of_an_evaluation():
    """Every token once and in order."""
    layout, x = ls.layouts.zigzag(TOKENS, dist.get_world_size()), whole(2, TOKENS, 3)
    found = gather_outputs(layout.shard(x, dist.get_rank(), 1), layout, dist.group.WORLD, 1)
    assert found.shape == x.shape
    return far(found, x)


def layers_that_need_neighbours():
    """A running sum over the sequence between layers of attention, with gradients."""
    zigzag, contiguous = (make(TOKENS, dist.get_world_size()) for make in (ls.layouts.zigzag, ls.layouts.contiguous))
    rank, group = dist.get_rank(), dist.group.WORLD
    x, weight = whole(1, TOKENS, 3), whole(1, TOKENS, 3, seed=1)
    one = x.clone().requires_grad_()
    (one.cumsum(1) * weight).sum().backward()
    mine = zigzag.shard(x, rank, 1).requires_grad_()
    rows = relayout(mine, zigzag, contiguous, group, 1)
    before = torch.zeros(dist.get_world_size(), 1, 3, dtype=torch.float64)
    dist.all_gather(list(before), rows.detach().sum(1))  # sums of the ranks before
    summed = rows.cumsum(1) + before[:rank].sum(0)
    out = relayout(summed, contiguous, zigzag, group, 1)
    error = far(out.detach(), zigzag.shard(x.cumsum(1), rank, 1))
    (out * zigzag.shard(weight, rank, 1)).sum().backward()
    local = contiguous.shard(weight, rank, 1).flip(1).cumsum(1).flip(1)  # later ranks' shares are theirs to send
    moved = relayout(local, contiguous, zigzag, group, 1)
    return max(error, far(mine.grad, moved))


def masks_inside_a_context():
    """Documents and a window in PyTorch's words."""
    mesh = mesh_of_all()
    mask = ls.masks.documents([8, 13]) & ls.masks.sliding_window(4)
    tensors = [whole(1, 2, TOKENS, 8, seed=n) for n in range(3)]
    right = ls.attention(*tensors, mask)
    with torch_api.context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3, mask=mask):
        out = F.scaled_dot_product_attention(*tensors)
        (found,) = torch_api.context_parallel_unshard(mesh, [out], [2])
    return far(found, right)


# -- refusals ----------------------------------------------------------------------------------------------------------


def message(call):
    try:
        call()
    except (ls.LongspanError, TypeError) as error:
        return str(error)
    return "raised nothing"


def different_batches():
    ids = torch.arange(TOKENS)[None] + dist.get_rank()
    return message(lambda: check_same({"input_ids": ids}, dist.group.WORLD))


def in_context(call):
    """What a call inside a context says."""
    mesh = mesh_of_all()
    tensors = [whole(1, 2, 16, 8, seed=n) for n in range(3)]
    with torch_api.context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
        return message(lambda: call(*tensors))


def dense_masks_of_local_rows():
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    return in_context(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def dropout_by_random_state():
    return in_context(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))


class Own(torch.nn.Module):
    """Attention by hand, which no hook sees."""

    def forward(self, q, k, v):
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v


def attention_that_goes_around():
    module = parallelize_module(Own(), mesh_of_all(), torch_api.ContextParallel())
    return message(lambda: module(*(whole(1, 2, 8, 8, seed=n) for n in range(3))))


def whole_tensors_as_shards():
    layout = ls.layouts.zigzag(TOKENS + 1, dist.get_world_size())
    plan = ls.plan(ls.masks.causal(), layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float64")
    tensors = [whole(1, 2, TOKENS + 1, 8, seed=n) for n in range(3)]
    said = message(lambda: ls.attention(*tensors, plan, group=dist.group.WORLD))
    return said.replace(f"on rank {dist.get_rank()}", "on rank r")


def averages_of_averages():
    """Whether gradients are added or averaged afterwards must be said, or they may be scaled by the number of ranks."""
    return message(lambda: token_loss(whole(4, CLASSES), torch.zeros(4, dtype=torch.int64), group=dist.group.WORLD))


ANSWERS = {
    f.__name__: f
    for f in (
        losses_on_any_number_of_ranks,
        ranks_without_labels,
        garbage_in_padding,
        predictions_of_an_evaluation,
        layers_that_need_neighbours,
        masks_inside_a_context,
    )
}
REFUSALS = {
    f.__name__: f
    for f in (
        different_batches,
        dense_masks_of_local_rows,
        dropout_by_random_state,
        attention_that_goes_around,
        whole_tensors_as_shards,
        averages_of_averages,
    )
}


def everything():
    """By name, errors of answers and messages of refusals; a check that raised says so."""
    found = {}
    for name, function in (ANSWERS | REFUSALS).items():
        try:
            found[name] = function()
        except Exception:
            found[name] = "raised " + traceback.format_exc()
    return found
