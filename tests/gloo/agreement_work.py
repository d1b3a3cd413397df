"""What ranks of a pool do for tests of agreement."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

import longspan as ls
from longspan.run import agreement, ops
from longspan.run import group as groups
from longspan.run.transports import observe

TOKENS, DIM = 96, 16


def _plan(**changes):
    mask = changes.pop("mask", ls.masks.documents([37, 59]) & ls.masks.causal())
    layout = changes.pop("layout", None) or ls.layouts.zigzag(TOKENS, dist.get_world_size())
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": DIM, "dtype": "float32", "scheme": "exchange"}
    return ls.plan(mask, layout, **(sizes | changes))


def _inputs(plan, seed=0):
    torch.manual_seed(seed)
    sizes, dtype = plan.sizes, getattr(torch, plan.dtype)
    heads = (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)
    whole = [torch.randn(1, h, plan.layout.seq_len, sizes.head_dim, dtype=dtype) for h in heads]
    return [plan.layout.shard(x, dist.get_rank(), dim=2).requires_grad_() for x in whole]


def _pass(plan, group=None, **options):
    """Output and gradients, and how far they are from one device."""
    q, k, v = _inputs(plan)
    out = ls.attention(q, k, v, plan, group=group or dist.group.WORLD, **options)
    torch.manual_seed(1)
    sizes = plan.sizes
    whole_dout = torch.randn(1, sizes.q_heads, plan.layout.seq_len, sizes.v_head_dim)
    dout = plan.layout.shard(whole_dout, dist.get_rank(), dim=2)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    torch.manual_seed(0)
    whole = [torch.randn(1, h, plan.layout.seq_len, DIM) for h in (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)]
    whole = [x.requires_grad_() for x in whole]
    one = ls.attention(*whole, plan.mask, **options)
    expected = [one.detach(), *torch.autograd.grad(one, whole, whole_dout)]
    parts = [plan.layout.shard(x, dist.get_rank(), dim=2) for x in expected]
    return max(float((a - b).abs().max()) for a, b in zip(found, parts, strict=True))


@contextmanager
def counted():
    """Counts the comparisons made inside."""
    calls, gather = [], groups.Members.gather

    def noted(self, row, device):
        calls.append(row)
        return gather(self, row, device)

    groups.Members.gather = noted
    try:
        yield calls
    finally:
        groups.Members.gather = gather


def comparisons():
    """How many comparisons a new plan, a repeat, another scale and its repeat take; and the worst error."""
    plan, found, errors = _plan(q_heads=2), [], []
    for options in ({}, {}, {"scale": 0.3}, {"scale": 0.3}, {}):
        with counted() as calls:
            errors.append(_pass(plan, **options))
        found.append(len(calls))
    return found, max(errors)


def _attention(name, odd):
    """The plan and the options of a call that differs in one thing on the odd rank."""
    changes, options = {"mask": ls.masks.causal() & ls.masks.sliding_window(40)}, {}
    layout = (ls.layouts.zigzag if odd else ls.layouts.contiguous)(TOKENS, dist.get_world_size())
    if name == "mask":
        changes = {"mask": ls.masks.causal() & ls.masks.sliding_window(17 if odd else 18)}
    elif name == "mask function":
        ids = torch.arange(TOKENS) // (30 if odd else 32)
        changes = {"mask": ls.masks.from_mask_mod(lambda b, h, q, kv: ids[q] == ids[kv], TOKENS)}
    elif name == "layout":
        changes |= {"layout": layout}
    elif name == "scheme":
        changes |= {"scheme": "exchange" if odd else "ring"}
    elif name == "dtype":
        changes |= {"dtype": "bfloat16" if odd else "float32"}
    elif name == "shapes":
        changes |= {"head_dim": 32 if odd else 16}
    elif name == "keep":
        changes |= {"scheme": "ring", "keep": odd}
    elif name == "kernel":
        options = {"kernel": "reference" if odd else "cpu_flash"}
    elif name == "scale":
        options = {"scale": 0.25 if odd else 0.125}
    elif name == "sinks":
        options = {"sinks": torch.zeros(4) if odd else None}
    elif name == "gradients":
        options = {"captured_grads": "share" if odd else "sum"}
    elif name == "function":
        options = {"softcap": 5.0} if odd else {}
    elif name == "name":
        options = {"name": "text" if odd else "image"}
    return _plan(**changes), options


def _recurrence(name, odd):
    world = dist.get_world_size()
    where = {"heads": 2, "keys": 8, "values": 8, "maps": "matrix", "scheme": "doubling", "dtype": "float32"}
    documents, options = [5, TOKENS - 5], {}
    layout = (ls.layouts.zigzag if odd and name == "scan layout" else ls.layouts.contiguous)(TOKENS, world)
    if name == "documents":
        documents = [7 + odd, TOKENS - 7 - odd]
    elif name == "scan scheme":
        where["scheme"] = "chain" if odd else "doubling"
    elif name == "scan scale":
        options = {"scale": 0.5 if odd else 0.125}
    elif name == "l2norm":
        options = {"l2norm": odd}
    plan = ls.scan_plan(documents, layout, **where)
    shape = (1, TOKENS // world, 2, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    g = torch.zeros(*shape[:3])
    return lambda: ls.gated_delta_rule(q, k, v, g, g + 0.5, plan=plan, group=dist.group.WORLD, **options)


RECURRENCES = ("documents", "scan layout", "scan scheme", "scan scale", "l2norm")


def different(name, by_store=False):
    """The error of a call that differs on the last rank, messages sent in it, and the error of a right pass after."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    if name in RECURRENCES:
        call = _recurrence(name, odd)
    elif name == "operator":
        plan = _plan(mask=ls.masks.causal() & ls.masks.sliding_window(7))
        attention = lambda: ls.attention(*_inputs(plan), plan, group=dist.group.WORLD)  # noqa: E731
        call = _recurrence(name, odd) if odd else attention
    else:
        plan, options = _attention("mask" if name in ("longspan", "torch") else name, odd and name != "longspan")
        call = lambda: ls.attention(*_inputs(plan), plan, group=dist.group.WORLD, **options)  # noqa: E731
    version, message_device, text = ops.VERSION, groups.message_device, ""
    if name == "longspan":
        ops.VERSION = "9.9" if odd else version
    if by_store:
        groups.message_device = lambda group, wanted=None: torch.device("cuda", 0)
    try:
        with observe() as traffic:
            call()
    except ls.AgreementError as error:
        text = str(error)
    finally:
        ops.VERSION = version
        error = _pass(_plan())
        groups.message_device = message_device
    return text, sum(traffic.num_messages.values()), error


def _store(kind):
    """The store of the pool, or a new one."""
    if kind == "FileStore":
        return agreement._torch.default_store()
    rank, port = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port.fill_(store.port)
    dist.broadcast(port, 0)
    return store or dist.TCPStore("127.0.0.1", int(port), None, False)


def by_store(kind, rounds):
    """Rows of comparisons through a store: equal rows, then different ones, and keys that are left; of two groups with
    the same name and ranks, as if one was created again."""
    rank, results, default, store = dist.get_rank(), [], agreement._torch.default_store, _store(kind)
    group = dist.new_group()
    for _ in range(2):
        agreement._torch.default_store = lambda: store
        rows = agreement.RowStore(group)
        agreement._torch.default_store = default
        for number in range(rounds):
            results.append(rows.gather(b"same" * 10))
            results.append(rows.gather(b"%d of rank %d" % (number, rank if number % 3 == 1 else 0)))
        dist.barrier()
        left = [rows.store.check([f"{number}/{key}"]) for number in range(1, 2 * rounds) for key in ("row", "arrived")]
        results.append([b"left"] * sum(left))
        dist.barrier()
    return results


def groups_are_freed():
    """Whether the state of a group is freed with the group."""
    import gc
    import weakref

    group = dist.new_group()
    error = _pass(_plan(), group)
    state = weakref.ref(groups.members_of(group))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return state() is None, error
