"""What ranks of a pool do for tests of agreement, checked mode and watching."""

import threading
import time

import torch
import torch.distributed as dist

import longspan as ls
import longspan.training as training
from longspan.run.group import Running, members_of
from longspan.run.transports import observe


def _plan(scheme, world, **changes):
    mask = ls.masks.documents([37, 60, 31 * world]) & ls.masks.causal()
    layout = ls.layouts.zigzag(97 + 31 * world, world)
    asked = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "scheme": scheme}
    return ls.plan(mask, layout, **{**asked, **changes})


def _inputs(plan, seed=0):
    torch.manual_seed(seed)
    sizes = plan.sizes
    heads = (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)
    whole = [torch.randn(1, h, plan.layout.seq_len, sizes.head_dim) for h in heads]
    return [plan.layout.shard(x, dist.get_rank(), dim=2).requires_grad_() for x in whole]


def _pass(plan, **options):
    q, k, v = _inputs(plan)
    out = ls.attention(q, k, v, plan, group=dist.group.WORLD, **options)
    torch.manual_seed(1)
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    return [out.detach(), *gradients]


def checked_and_not(scheme):
    """Whether both modes give the same bits and count the same bytes; whether checked mode reaches backward."""
    plan = _plan(scheme, dist.get_world_size())
    with observe() as plain:
        usual = _pass(plan)
    with observe() as counted, training.watch(dist.group.WORLD, checked=True):
        checked = _pass(plan)
    return all(map(torch.equal, usual, checked)), plain.num_bytes == counted.num_bytes


def agreements():
    """How many comparisons a new plan, a repeat, another scale and its repeat take."""
    calls, rows = [], Running.rows

    def counted(self, row):
        calls.append(1)
        return rows(self, row)

    Running.rows = counted
    try:
        found = []
        plan = _plan("exchange", dist.get_world_size(), head_dim=24)
        for options in ({}, {}, {"scale": 0.3}, {"scale": 0.3}, {}):
            before = len(calls)
            _pass(plan, **options)
            found.append(len(calls) - before)
        return found
    finally:
        Running.rows = rows


def late(seconds):
    """A rank that comes late but lives is waited for."""
    plan = _plan("ring", dist.get_world_size())
    with training.watch(dist.group.WORLD, patience=2.5):
        right = _pass(plan)
        if dist.get_rank() == 1:
            time.sleep(seconds)
        return all(map(torch.equal, right, _pass(plan)))


def unwatched():
    """Whether turning it off leaves no thread behind, and results alone."""
    plan = _plan("ring", dist.get_world_size())
    group = dist.new_group(list(range(dist.get_world_size())))
    before = threading.active_count()
    q, k, v = _inputs(plan)
    with training.watch(group, enabled=False):
        ls.attention(q, k, v, plan, group=group).sum().backward()
    return threading.active_count() - before, members_of(group)._watch is None


def refused_by_all():
    """A call that every rank refuses leaves the group fit for the next."""
    plan = _plan("ring", dist.get_world_size())
    q, k, v = _inputs(plan)
    try:
        ls.attention(q[:, :, 1:], k, v, plan, group=dist.group.WORLD)
    except ls.PlanError:
        return all(map(torch.equal, _pass(plan), _pass(plan)))
    return False


def disagreed_then_agreed():
    """Ranks that ask for different things are refused alike, and may go on afterwards."""
    plan = _plan("ring", dist.get_world_size())
    q, k, v = _inputs(plan)
    try:
        ls.attention(q, k, v, plan, group=dist.group.WORLD, scale=0.1 * (1 + dist.get_rank()))
    except ls.LongspanError as error:
        return str(error), all(map(torch.equal, _pass(plan), _pass(plan)))
    return "", False


def refused_by_one_then_swallowed():
    """A refusal of the arguments themselves is told, too: the next call must not pair up with it."""
    plan = _plan("ring", dist.get_world_size())
    q, k, v = _inputs(plan)
    group = dist.new_group(list(range(dist.get_world_size())))
    ls.attention(q, k, v, plan, group=group)
    said = []
    for step in range(2):
        try:
            ls.attention(q, k, v, plan, group=group, scale="x" if step == 0 and dist.get_rank() == 1 else None)
        except ls.LongspanError as error:
            said.append((type(error).__name__, str(error)))
    return said


def ended_on_purpose():
    """Loops that end early on purpose leave the group usable."""
    plan = _plan("ring", dist.get_world_size())

    def steps():
        with training.watch(dist.group.WORLD) as watching:
            for step in range(5):
                watching.step(step)
                yield _pass(plan)

    first = next(iter(steps()))
    return all(map(torch.equal, first, _pass(plan)))


def compiled_settings():
    """The settings that a compiled call runs with are those of where it runs."""
    plan = _plan("ring", dist.get_world_size())
    group = dist.group.WORLD
    q, k, v = _inputs(plan)
    call = torch.compile(lambda q, k, v: ls.attention(q, k, v, plan, group=group), backend="aot_eager", fullgraph=True)
    call(q, k, v).sum().backward()
    with training.watch(group, patience=25.0, checked=True):
        call(q, k, v).sum().backward()
        inside = members_of(group).settings
    return inside.patience, inside.checked


def groups_are_let_go():
    """Watching ends with the group."""
    import gc

    plan = _plan("ring", dist.get_world_size())
    before = threading.active_count()
    group = dist.new_group(list(range(dist.get_world_size())))
    q, k, v = _inputs(plan)
    ls.attention(q, k, v, plan, group=group)
    during = threading.active_count()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.1)
    return during > before, threading.active_count() <= before
