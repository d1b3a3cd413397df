"""What ranks do in the tests of PyTorch's own names; importable by name, as worker processes need it."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

import longspan as ls
from longspan._torch import function_modes
from longspan.torch_api import _attention as names
from longspan.torch_api import count_messages
from longspan.torch_api._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _create_cp_block_mask,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    _templated_ring_attention,
    context_parallel,
    context_parallel_unshard,
    flex_cp_allgather,
    set_rotate_method,
)

TYPES = _ContextParallel.AttentionType


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def draw(*shape, dtype=torch.float64, seed=0):
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def worst(pairs):
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def reset():
    """Give a test the options of a new process."""
    _cp_options.enable_load_balance = True


class Sdpa(nn.Module):
    def __init__(self, backend, compiled):
        super().__init__()
        self.backend, self.sdpa = backend, sdpa_of(compiled)

    def forward(self, *args, **kwargs):
        with sdpa_kernel(self.backend):
            return self.sdpa(*args, **kwargs)


def sdpa_of(compiled):
    function = F.scaled_dot_product_attention
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


def sdpa_cell(mesh, backend, compiled, is_causal, load_balance, rotate, forward_only, use_context):
    """One cell of PyTorch's SDPA test, in its own words; the largest error of the output and of all gradients."""
    set_rotate_method(rotate)
    assert _cp_options.rotate_method.name == {"allgather": "ALL_GATHER", "alltoall": "ALL_TO_ALL"}[rotate]
    q, k, v = (t.requires_grad_() for t in draw(3, 2, 4, 32 * mesh.size(), 8))
    dout = draw(2, 4, 32 * mesh.size(), 8, seed=1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    right = [expected.detach(), *torch.autograd.grad(expected, (q, k, v), dout)]
    buffers = [t.detach().clone() for t in (q, k, v, dout)]
    context = None
    if use_context:
        _cp_options.enable_load_balance = load_balance
        context = context_parallel(mesh, buffers=tuple(buffers), buffer_seq_dims=(2,) * 4)
        context.__enter__()
        attention = sdpa_of(compiled)
    else:
        style = _ContextParallel(seq_dim=2, attention_type=TYPES.SDPA)
        attention = parallelize_module(Sdpa(backend, compiled), mesh, style)
        balancer = _HeadTailLoadBalancer(q.shape[2], mesh.size(), q.device) if load_balance else None
        buffers = list(_context_parallel_shard(mesh, tuple(buffers), (2,) * 4, load_balancer=balancer))
        _enable_context_parallel_dispatcher()
    *leaves, dout = buffers
    for leaf in leaves:
        leaf.requires_grad = True
    with torch.set_grad_enabled(not forward_only), sdpa_kernel(backend), count_messages() as forward:
        out = attention(*leaves, is_causal=is_causal)
    with count_messages() as backward:
        if not forward_only:
            out.backward(dout)
    others = mesh.size() - 1
    assert sum(forward.num_messages.values()) == others
    if not forward_only:  # PyTorch's ring sends 2 * others + 1
        sent = sum(backward.num_messages.values())
        assert sent == 2 * others if rotate == "allgather" else others <= sent < 2 * others + 1, sent
    found = [out.detach(), *([] if forward_only else [leaf.grad for leaf in leaves])]
    for leaf in leaves:
        leaf.requires_grad = False
    if context is None:
        _disable_context_parallel_dispatcher()
    else:
        context.__exit__(None, None, None)
    whole = context_parallel_unshard(mesh, found, [2] * len(found))
    return worst(zip(whole, right[: len(found)], strict=True))


def sdpa_matrix(backend, compiled):
    """All 24 cells, one after another in one process, so that both layouts were used for the same lengths. Half of them
    if compiled, since that takes long."""
    reset()
    mesh, found = mesh_of_all(), []
    rotations = ("alltoall",) if compiled else ("alltoall", "allgather")
    for causal, balance, rotate, only, context in itertools.product(
        (True, False), (True, False), rotations, (True, False), (True, False)
    ):
        if causal or not balance:
            torch._dynamo.reset()
            cell = getattr(SDPBackend, backend), compiled, causal, balance, rotate, only, context
            found.append((str(cell), sdpa_cell(mesh, *cell), 1e-12))
    return found


def causal_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents_mod(lengths):
    """PyTorch's spelling of packed documents, one list of lengths per batch row."""
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])

    def documents(b, h, q_idx, kv_idx):
        return ids[b][q_idx] == ids[b][kv_idx]

    return and_masks(documents, causal_mod)


class Own(_LoadBalancer):
    """A user's balancer: every second token, the second half backwards."""

    def __init__(self, tokens):
        self.tokens = tokens

    def _generate_indices(self, restore=False):
        indices = torch.cat([torch.arange(0, self.tokens, 2), torch.arange(self.tokens - 1, 0, -2)])
        return (torch.argsort(indices) if restore else indices).unsqueeze(0)


class Flex(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def flex_cell(mesh, lengths, balancer_name, compiled, score_mod=None, gathered=False):
    """PyTorch's flex test: shards of q, k, v and of the BlockMask, the module wrapper, LSE and gradients."""
    rows, tokens, world = len(lengths), sum(lengths[0]), mesh.size()
    q, k, v, dout = (t for t in draw(4, rows, 2, tokens, 8, dtype=torch.float32))
    whole = create_block_mask(documents_mod(lengths), rows, 1, tokens, tokens, device="cpu")
    balancer = {
        "none": lambda: None,
        "head_tail": lambda: _HeadTailLoadBalancer(tokens, world, "cpu"),
        "per_document": lambda: _PerDocumentHeadTailLoadBalancer(lengths, world, "cpu"),
        "ptrr": lambda: _PTRRLoadBalancer(whole, world),
        "own": lambda: Own(tokens),
    }[balancer_name]()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(2, 3) / 8**0.5
    at = torch.arange(tokens)
    if score_mod is not None:
        b, h = torch.arange(rows).view(-1, 1, 1, 1), torch.arange(2).view(-1, 1, 1)
        scores = score_mod(scores, b, h, at.view(-1, 1), at)
    mask = ls.masks.from_mask_mod(documents_mod(lengths), tokens, rows=rows)
    allowed = torch.stack(
        [torch.from_numpy(mask.allows(at.view(-1, 1).numpy(), at.numpy(), row=row)) for row in range(rows)]
    ).unsqueeze(1)
    scores = scores.masked_fill(~allowed, -torch.inf)
    out = scores.softmax(-1) @ leaves[2]
    right = [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout.double())]

    attention = torch.compile(flex_attention) if compiled else flex_attention
    module = parallelize_module(Flex(attention), mesh, _ContextParallel(seq_dim=2, attention_type=TYPES.FLEX))
    *shards, local_dout, local_mask = _context_parallel_shard(
        mesh, [t.clone() for t in (q, k, v, dout)] + [whole], [2] * 5, load_balancer=balancer
    )
    for shard in shards:
        shard.requires_grad = True
    out, aux = module(*shards, score_mod, block_mask=local_mask, return_aux=AuxRequest(lse=True))
    out.backward(local_dout)
    found = [out.detach(), aux.lse.detach(), *(shard.grad for shard in shards)]
    whole = context_parallel_unshard(mesh, found, [2] * 5, load_balancer=balancer)
    return worst(zip(whole, right, strict=True))


def distance(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx) * (h + 1) + 0.01 * q_idx


def flex_matrix():
    reset()
    mesh = mesh_of_all()
    step = 2 * mesh.size()
    lengths = [[4 * step, 2 * step, 10 * step], [step, 9 * step, 6 * step]]
    found = []
    for balancer, score_mod in itertools.product(("none", "head_tail", "per_document", "own"), (None, distance)):
        error = flex_cell(mesh, lengths, balancer, compiled=False, score_mod=score_mod)
        found.append((f"{balancer} {score_mod}", error, 2e-5))
    lengths = [[300, 212], [100, 412]]
    for balancer in ("ptrr", "head_tail"):
        found.append((f"{balancer} compiled", flex_cell(mesh, lengths, balancer, compiled=True), 2e-5))
    return found


def gathered_by_hand():
    """The manual way of PyTorch's example: K and V gathered by the user, the function swapped for ours."""
    reset()
    mesh, tokens = mesh_of_all(), 256
    q, k, v = draw(3, 2, 2, tokens, 8)
    found = []
    for balancer in (None, _HeadTailLoadBalancer(tokens, mesh.size(), "cpu")):
        _cp_options.enable_load_balance = balancer is not None
        mask = _create_cp_block_mask(causal_mod, 1, 1, tokens, tokens, mesh, balancer)
        later = _create_cp_block_mask(causal_mod, 1, 1, tokens, tokens, (128, 128), mesh, balancer)  # as in 2.15
        assert torch.equal(later.to_dense(), mask.to_dense())
        shards = _context_parallel_shard(mesh, [q, k, v], [2] * 3, balancer)
        keys, values = flex_cp_allgather(shards[1], shards[2], 2, mesh.get_group().group_name)
        out = flex_attention(shards[0], keys, values, block_mask=mask)
        (out,) = context_parallel_unshard(mesh, [out], [2], balancer)
        found.append((str(balancer), worst([(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))]), 1e-12))
    return found


def shards():
    """Containers, pairs of shard and unshard, and that PyTorch's balancers put tokens where PyTorch puts them."""
    reset()
    mesh = mesh_of_all()
    rank, world = mesh.get_local_rank(), mesh.size()
    x, y = torch.arange(4.0 * 16 * world).view(4, -1), torch.arange(16 * world)
    tokens = x.shape[1]
    rows = [[tokens], [tokens // 2, tokens // 2], [tokens // 4, 3 * tokens // 4], [tokens]]
    balancers = [
        None,
        Own(tokens),
        _HeadTailLoadBalancer(tokens, world, "cpu"),
        _PerDocumentHeadTailLoadBalancer([[tokens // 2, tokens // 2]], world, "cpu"),
        _PerDocumentHeadTailLoadBalancer(rows, world, "cpu"),
    ]
    for balancer in balancers:
        (shard,) = _context_parallel_shard(mesh, [x], [1], balancer)
        indices = torch.arange(tokens)[None] if balancer is None else balancer._generate_indices()
        assert torch.equal(shard, torch.gather(x, 1, indices.expand(4, -1)).chunk(world, 1)[rank])
        assert bool(_cp_options.enable_load_balance) == (balancer is not None)
        (back,) = context_parallel_unshard(mesh, [shard], [1], balancer)
        assert torch.equal(back, x)
        if balancer in (None, balancers[2]):
            assert torch.equal(context_parallel_unshard(mesh, [shard], [1])[0], x)  # as the option says
    made = _context_parallel_shard(mesh, {"x": x, "y": y}, {"y": 0, "x": 1}, balancers[2])
    assert list(made) == ["x", "y"]
    assert torch.equal(made["x"][0], made["y"].float())
    assert isinstance(_context_parallel_shard(mesh, (x, y), (1, 0)), tuple)
    # The latest shard sets the option, which decides.
    x = x[:, : tokens // 2]
    for is_balanced in (True, False, True):
        balancer = _HeadTailLoadBalancer(tokens // 2, world, "cpu") if is_balanced else None
        (shard,) = _context_parallel_shard(mesh, [x], [1], balancer)
        assert torch.equal(context_parallel_unshard(mesh, [shard * 2], [1])[0], x * 2)
    return "done"


def refusals():
    """Each call must raise; returns the messages."""
    reset()
    mesh = mesh_of_all()
    tokens = 16 * mesh.size()
    x, odd = torch.zeros(3, tokens), torch.zeros(2, 17)
    rows = [[tokens], [tokens // 2, tokens // 2], [tokens]]
    per_row = _PerDocumentHeadTailLoadBalancer(rows, mesh.size(), "cpu")

    class Twice(_LoadBalancer):
        def _generate_indices(self, restore=False):
            return torch.zeros(1, tokens, dtype=torch.int64)

    def without_balancer():
        (shard,) = _context_parallel_shard(mesh, [x], [1], per_row)
        context_parallel_unshard(mesh, [shard], [1])

    def odd_length():
        _context_parallel_shard(mesh, [odd], [1], _HeadTailLoadBalancer(17, mesh.size(), "cpu"))

    calls = {
        "rotate": lambda: set_rotate_method("mail"),
        "odd": odd_length,
        "rows": lambda: _context_parallel_shard(mesh, [x[:2]], [1], per_row),
        "dim": lambda: _context_parallel_shard(mesh, [x.T], [0], per_row),
        "twice": lambda: _context_parallel_shard(mesh, [x], [1], Twice()),
        "untold": without_balancer,
        "keys": lambda: _context_parallel_shard(mesh, {"x": x}, {"y": 1}),
        "seq_dim": lambda: _ContextParallel(1, TYPES.SDPA),
        "lengths": lambda: _create_cp_block_mask(causal_mod, 1, 1, 256, 512, mesh),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__mro__[:-3]} {error}"
        else:
            found[name] = "accepted"
    return found


def dispatcher():
    """DTensors sharded along the sequence attend over ranks while the dispatcher is on, and as PyTorch does after."""
    reset()
    mesh = mesh_of_all()
    q, k, v = draw(3, 2, 2, 8 * mesh.size(), 8)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    _cp_options.enable_load_balance = False
    tensors = [distribute_tensor(t.clone().requires_grad_(), mesh, [Shard(2)]) for t in (q, k, v)]
    _enable_context_parallel_dispatcher()
    _enable_context_parallel_dispatcher()
    out = F.scaled_dot_product_attention(*tensors, is_causal=True)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(2),)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    _disable_context_parallel_dispatcher()
    _disable_context_parallel_dispatcher()
    assert not any(isinstance(mode, names._Dispatcher) for mode in function_modes())
    with sdpa_kernel(SDPBackend.MATH):
        after = F.scaled_dot_product_attention(*tensors)  # PyTorch's own, which gathers
    full = F.scaled_dot_product_attention(q, k, v)
    return [
        ("over ranks", worst([(out.full_tensor(), right)]), 1e-12),
        ("plain", worst([(plain, right)]), 0.0),
        ("after", worst([(after.full_tensor(), full)]), 1e-12),
    ]


def templated_ring():
    """A ring over an operator of the user."""
    reset()
    mesh = mesh_of_all()
    found, tokens = [], 16 * mesh.size()
    q, k, v = draw(3, 2, 2, tokens, 8)

    def operator(query, key, value, is_causal=False, scale=None):
        scores = query @ key.transpose(2, 3) * scale
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ value, scores.logsumexp(-1), "rest"

    for causal, rotate in itertools.product((True, False), ("allgather", "alltoall")):
        set_rotate_method(rotate)
        balancer = _HeadTailLoadBalancer(tokens, mesh.size(), "cpu") if causal else None
        local = _context_parallel_shard(mesh, [q, k, v], [2] * 3, balancer)
        out, lse, rest = _templated_ring_attention(mesh.get_group(), 2, operator, *local, is_causal=causal, scale=0.3)
        assert rest == "rest"
        assert lse.shape == out.shape[:3]
        (out,) = context_parallel_unshard(mesh, [out], [2], balancer)
        right = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
        found.append((f"{causal} {rotate}", worst([(out, right)]), 1e-5))  # PyTorch merges in float32
    return found


def memory_order():
    """Outputs have the query's order in memory, so that the usual view of them works; compiled, too."""
    reset()
    mesh = mesh_of_all()
    x = draw(2, 32 * mesh.size(), 4, 8)
    right = F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3, is_causal=True)
    whole, found = x.clone(), []
    block_mask = create_block_mask(causal_mod, None, None, x.shape[1], x.shape[1], device="cpu")

    def sdpa(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).view(2, 32, -1)

    calls = {
        "sdpa": sdpa,
        "compiled": torch.compile(sdpa, fullgraph=True, backend="aot_eager"),
        "flex": lambda q: flex_attention(q, q, q, block_mask=block_mask).transpose(1, 2).view(2, 32, -1),
    }
    for name, call in calls.items():
        with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[1]):
            (out,) = context_parallel_unshard(mesh, [call(whole.transpose(1, 2))], [1])
        found.append((name, worst([(out, right.transpose(1, 2).flatten(2))]), 1e-12))
    return found


def dtensors_untold():
    """The placement of a DTensor says that it is cut into stretches; a context without a balancer believes it."""
    mesh = mesh_of_all()
    q, k, v = draw(3, 2, 2, 11 * mesh.size(), 8)
    tensors = [distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)]
    _cp_options.enable_load_balance = False
    with context_parallel(mesh):
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
    return [("cut", worst([(out.full_tensor(), F.scaled_dot_product_attention(q, k, v, is_causal=True))]), 1e-12)]


def short_sequences():
    """One token per rank is not balanced, and says so inside."""
    reset()
    mesh = mesh_of_all()
    q, k, v = draw(3, 2, 2, mesh.size(), 8)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    buffers = [t.clone() for t in (q, k, v)]
    with names.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        assert not _cp_options.enable_load_balance
        out = F.scaled_dot_product_attention(*buffers, is_causal=True)
    assert _cp_options.enable_load_balance
    (out,) = context_parallel_unshard(mesh, [out], [2])
    return [("one token per rank", worst([(out, right)]), 1e-12)]
