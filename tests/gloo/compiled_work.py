"""What ranks of a pool do for tests of compiled calls."""

import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.run.transports import observe
from longspan.testing.oracle import dense_attention

HEADS, D, S = 2, 16, 96
LIMIT = 1e-11
"""float64, over 96 keys and a product of 32 terms before and after."""


class Counting:
    """A compiler that counts graphs. PyTorch may ask twice for one, when it finds out on the way what must be fixed."""

    def __init__(self, name="aot_eager"):
        self.backend, self.before = lookup_backend(name), counters["stats"]["unique_graphs"]

    @property
    def made(self):
        return counters["stats"]["unique_graphs"] - self.before

    def __call__(self, graph, inputs):
        return self.backend(graph, inputs)


def heads(x):
    return x.unflatten(-1, (HEADS, D)).transpose(1, 2)


def weights():
    return torch.randn(HEADS * D, HEADS * D, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 6


def truth(x, weight, mask, dout):
    """Output of a block, and the gradient of its input."""
    x = x.detach().clone().requires_grad_()
    out = dense_attention(heads(x @ weight), heads(x), heads(2 * x), mask, D**-0.5)[0]
    out = x + out.transpose(1, 2).flatten(2)
    return out.detach(), torch.autograd.grad(out, x, dout)[0]


def packed(num_batches, backend, options, keep=False, recomputes=False, scheme="auto"):
    """The worst error of packed batches, each with a plan of its own, how often was compiled, and bytes received."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    weight, compiler = weights(), Counting(backend)

    def attend(x, plan):
        q, k, v = heads(x @ weight), heads(x), heads(2 * x)
        return x + ls.attention(q, k, v, plan, group=group).transpose(1, 2).flatten(2)

    def block(x, plan):
        return checkpoint(attend, x, plan, use_reentrant=False) if recomputes else attend(x, plan)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=compiler, **options)
    worst, num_bytes = 0.0, []
    for n in range(num_batches):
        draw = torch.Generator().manual_seed(n)
        cut = int(torch.randint(1, S - 1, (), generator=draw))
        mask = ls.masks.documents([cut, S - cut]) & ls.masks.causal()
        layout = ls.layouts.zigzag(S, world)
        asked = {"q_heads": HEADS, "kv_heads": HEADS, "head_dim": D, "dtype": "float64", "scheme": scheme}
        plan = ls.plan(mask, layout, keep=keep, **asked)
        whole, dout = torch.randn(2, 1, S, HEADS * D, generator=draw, dtype=torch.float64)
        x = layout.shard(whole, rank, dim=1).clone().requires_grad_()
        expected = truth(whole, weight, mask, dout)
        out = compiled(x, plan)
        del plan  # what backward needs is kept by what autograd saved
        with observe() as seen:
            found = out.detach(), torch.autograd.grad(out, x, layout.shard(dout, rank, dim=1))[0]
        num_bytes.append(sum(seen.num_bytes.values()))
        errors = [(a - layout.shard(b, rank, dim=1)).abs().max() for a, b in zip(found, expected, strict=True)]
        worst = max(worst, *map(float, errors))
    return worst, compiler.made, sum(num_bytes)
