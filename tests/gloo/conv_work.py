"""What ranks do in the tests of convolutions; importable by name, as worker processes need it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.run.transports import observe
from tests.conv_cases import conv_case, expected, worst


def on_rank(case, run=ls.causal_conv1d, group=None):
    """Output and gradients of this rank; those of weight and bias summed over ranks."""
    rank, layout = dist.get_rank(), case.layout
    x, weight, bias, dout = case.tensors
    own = [layout.shard(x, rank, 1, torch.nan), weight.clone(), None if bias is None else bias.clone()]
    leaves = [t.requires_grad_() for t in own if t is not None]
    out = run(*own, plan=case.plan, group=group or dist.group.WORLD, activation=case.activation)
    dx, *shared = torch.autograd.grad(out, leaves, layout.shard(dout, rank, 1, torch.nan))
    for gradient in shared:
        dist.all_reduce(gradient)
    return out.detach(), dx, *shared


def errors(case, found):
    rank, layout = dist.get_rank(), case.layout
    out, dx, *shared = expected(case)
    padding = layout.num_padding(rank)
    assert not padding or not (found[0][:, -padding:].any() or found[1][:, -padding:].any())
    return worst(found, (layout.shard(out.detach(), rank, 1), layout.shard(dx, rank, 1), *shared))


def run_cases(seeds, world):
    """For each seed, what is wrong on this rank at most."""
    found = []
    for seed in seeds:
        case = conv_case(seed, world)
        with observe() as traffic:
            made = on_rank(case)
        steps = [s for way in ("forward", "backward") for s in case.plan.halo.steps(dist.get_rank(), way)]
        sizes, rank = case.plan.halo.sizes, dist.get_rank()
        assert traffic.sent_bytes(rank) == sum(
            t.piece.num_bytes(sizes) for s in steps for t in s.transfers if t.src == rank
        )
        found.append((seed, str(case), errors(case, made)))
    return found


def scenes():
    """The largest error of each way to call it."""
    world = dist.get_world_size()
    case = conv_case(30 + world, world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))

    def checkpointed(*tensors, **options):
        return checkpoint(lambda *t: ls.causal_conv1d(*t, **options), *tensors, use_reentrant=False)

    def transposed(x, *tensors, **options):
        return ls.causal_conv1d(x.mT.contiguous().mT, *tensors, **options)

    found = {
        "mesh": errors(case, on_rank(case, group=mesh["cp"])),
        "checkpointed": errors(case, on_rank(case, checkpointed)),
        "transposed": errors(case, on_rank(case, transposed)),
        "twice": errors(case, on_rank(case)),
    }
    narrow = conv_case(30 + world, world, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = on_rank(narrow)
    assert made[0].dtype == torch.bfloat16
    found["autocast"] = [error / 1e11 for error in errors(narrow, made)]  # 0.1 at most
    return {name: max(values) for name, values in found.items()}


def _plan(world, **changes):
    size = {"channels": 4, "width": 3, "dtype": "float32"}
    layout = changes.pop("layout", ls.layouts.contiguous(8 * world, world))
    return ls.conv_plan(changes.pop("documents", None), layout, **{**size, **changes})


def refusals():
    """Messages of calls that all ranks refuse, and, last, whether a right one still works."""
    world, group = dist.get_world_size(), dist.group.WORLD
    x, weight = torch.randn(1, 8, 4), torch.randn(4, 3)
    attention = ls.plan(
        ls.masks.causal(), ls.layouts.contiguous(8 * world, world), q_heads=1, kv_heads=1, head_dim=4, dtype="float32"
    )
    bad = {
        "no group": lambda: ls.causal_conv1d(x, weight, plan=_plan(world)),
        "no plan": lambda: ls.causal_conv1d(x, weight, group=group),
        "tokens": lambda: ls.causal_conv1d(x[:, 1:], weight, plan=_plan(world), group=group),
        "dtype": lambda: ls.causal_conv1d(x.double(), weight.double(), plan=_plan(world), group=group),
        "size": lambda: ls.causal_conv1d(
            x, weight, plan=_plan(world, layout=ls.layouts.contiguous(8, world + 1)), group=group
        ),
        "width": lambda: ls.causal_conv1d(x, torch.randn(4, 2), plan=_plan(world), group=group),
        "attention's": lambda: ls.causal_conv1d(x, weight, plan=attention, group=group),
        "a convolution's": lambda: ls.attention(*torch.randn(3, 1, 1, 8, 4), _plan(world), group=group),
        "both": lambda: ls.causal_conv1d(x, weight, documents=[8], plan=_plan(world), group=group),
        "no group at all": lambda: ls.causal_conv1d(x, weight, plan=_plan(world), group="cp"),
    }
    messages = {}
    for name, call in bad.items():
        try:
            call()
        except ls.LongspanError as error:
            messages[name] = str(error)
    ls.causal_conv1d(x, weight, plan=_plan(world), group=group)
    return messages


def different(what):
    """The message of a call in which rank 1 comes with another plan, width or name."""
    world, odd = dist.get_world_size(), dist.get_rank() == 1
    changes, width = {}, 3
    if what == "documents":
        changes = {"documents": [7 if odd else 6, 8 * world - (7 if odd else 6)]}
    elif what == "layout":
        changes = {"layout": (ls.layouts.zigzag if odd else ls.layouts.contiguous)(8 * world, world), "channels": 6}
    elif what == "width":  # documents of one token: no width sends anything
        width = 4 if odd else 5
        changes = {"documents": [1] * (8 * world), "width": width}
    plan = _plan(world, **changes)
    x = torch.randn(1, 8, plan.channels, requires_grad=True)
    try:
        ls.causal_conv1d(x, torch.randn(plan.channels, width), plan=plan, group=dist.group.WORLD)
    except ls.LongspanError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was found"
