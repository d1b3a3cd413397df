"""What ranks do in the tests of PyTorch's words; importable by name, as worker processes need it."""

import copy
import itertools
import math
import threading
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan._torch import cp_options
from longspan.testing import dense_gradients
from longspan.torch_api import api
from longspan.torch_api.routes import Router, current, rotation, routes
from longspan.versions import minor

LENGTHS = [9, 17, 4, 7]
TOKENS = sum(LENGTHS)  # 37: no number of ranks divides it
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5}


def mesh_of_all():
    """A mesh of all ranks, and the options of a new process."""
    cp_options().enable_load_balance = True
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def whole(tokens=TOKENS, heads=2, kv_heads=2, dtype=torch.float64, seed=0, batch=2, dim=8):
    """q, k, v and a gradient of the output, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, h, tokens, dim, generator=draw, dtype=torch.float64).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


class Sdpa(torch.nn.Module):
    def forward(self, q, k, v, is_causal=False, enable_gqa=False):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


class Flex(torch.nn.Module):
    def forward(self, q, k, v, score_mod=None, block_mask=None):
        return api.flex_attention(q, k, v, score_mod, block_mask)


class Local(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v


def errors_of(mesh, balancer, tensors, mask, found, scale=None):
    """The largest differences of out (and dq, dk, dv) to the oracle; `found` are shards."""
    q, k, v, dout = tensors
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out, _, *gradients = dense_gradients(q, k, v, mask.resized(q.shape[2]), scale, dout)
    right = [out, *gradients][: len(found)]
    made = api.context_parallel_unshard(mesh, [t.detach() for t in found], [2] * len(found), balancer)
    return max(float((a.double() - b).abs().max()) for a, b in zip(made, right, strict=True))


def in_context(mesh, tensors, balancer, is_causal, forward_only, mask=None, enable_gqa=False):
    """Shards of out and, unless `forward_only`, of the gradients."""
    q, k, v, dout = (t.clone() for t in tensors)
    options = {"load_balancer": balancer, "mask": mask}
    with api.context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2, 2, -2, 2], **options):
        if forward_only:
            with torch.no_grad():
                return [F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)]
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=enable_gqa)
        out.backward(dout)
    return [out, *(t.grad for t in leaves)]


def wrapped(mesh, tensors, balancer, is_causal, forward_only, mask=None, enable_gqa=False):
    """The same through a wrapped module."""
    module = parallelize_module(Sdpa(), mesh, api.ContextParallel(2, "sdpa", mask=mask, load_balancer=balancer))
    *leaves, dout = api.context_parallel_shard(mesh, tensors, [2] * 4, balancer)
    if forward_only:
        with torch.no_grad():
            return [module(*leaves, is_causal=is_causal, enable_gqa=enable_gqa)]
    leaves = [t.requires_grad_() for t in leaves]
    out = module(*leaves, is_causal=is_causal, enable_gqa=enable_gqa)
    out.backward(dout)
    return [out, *(t.grad for t in leaves)]


WAYS = {"context": in_context, "wrapper": wrapped}


def matrix(way, tokens):
    """PyTorch's own matrix: causal x balance x rotation x forward only, in two dtypes."""
    mesh, found = mesh_of_all(), []
    causal, balancers = (True, False), (api.HeadTail(), api.Contiguous())
    rotations, only = (None, "allgather", "alltoall"), (True, False)
    for is_causal, balancer, method, forward_only in itertools.product(causal, balancers, rotations, only):
        dtype = torch.float32 if method == "allgather" else torch.float64
        tensors = whole(tokens, dtype=dtype)
        mask = ls.masks.causal() if is_causal else ls.masks.full()
        with api.set_rotate_method(method) if method else warnings.catch_warnings():
            shards = WAYS[way](mesh, tensors, balancer, is_causal, forward_only)
        error = errors_of(mesh, balancer, tensors, mask, shards)
        found.append((f"{is_causal=} {balancer} {method} {forward_only=} {dtype}", error, LIMIT[dtype]))
    return found


def masks_and_balancers(way):
    """Packed documents, windows and heads that share keys, under every balancer."""
    mesh, found = mesh_of_all(), []
    documents = ls.masks.documents(LENGTHS)
    masks = [documents, ls.masks.sliding_window(5), documents & ls.masks.sliding_window(3, 2)]
    layout = ls.layouts.striped(TOKENS, dist.get_world_size(), stripe=3)
    balancers = [api.PerDocument(LENGTHS), api.RoundRobin(documents & ls.masks.causal(), block=4), layout]
    balancers.append(api.Balanced(documents))
    if way == "wrapper":
        balancers.append(ls.layouts.zigzag(TOKENS, dist.get_world_size(), equal_tokens=True))
    for number, (mask, balancer) in enumerate(itertools.product(masks, balancers)):
        tensors = whole(heads=4, kv_heads=2, seed=number)
        is_causal = bool(number % 2)
        meant = mask & ls.masks.causal() if is_causal else mask
        shards = WAYS[way](mesh, tensors, balancer, is_causal, False, mask, enable_gqa=True)
        found.append((f"{mask} {balancer} {is_causal=}", errors_of(mesh, balancer, tensors, meant, shards), 1e-12))
    return found


def rotations():
    """The schedule a call gets under each method, set outside or inside the context, and after all that."""
    mesh, names = mesh_of_all(), []
    q, k, v, _ = whole(64)
    with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        route = current()
        for method in ("allgather", "alltoall"):
            with api.set_rotate_method(method):
                names.append(route.plan(q, k, v, None).scheme.name)
    with api.set_rotate_method("alltoall"), api.context_parallel(mesh, seq_len=64):
        names.append(current().plan(q[:, :, : 64 // mesh.size()], *whole(64 // mesh.size())[:2], None).scheme.name)
    assert rotation.get() == "auto"
    return names


def buffers():
    """Buffers inside and after contexts. Everything asserts; the value says that it came to the end."""
    mesh, rank = mesh_of_all(), dist.get_rank()
    batch = torch.arange(2 * (TOKENS + 1)).view(2, TOKENS + 1)
    inputs, labels = batch[:, :-1], batch[:, 1:]  # views of one tensor, as data loaders make them
    table = torch.randn(TOKENS, 4, dtype=torch.complex64)
    flags = torch.rand(TOKENS) > 0.5
    given, dims = [inputs, labels, table, flags], [1, 1, 0, -1]
    before, places = [t.clone() for t in given], [(t.data_ptr(), t.stride()) for t in given]
    position = torch.as_tensor(ls.layouts.zigzag(TOKENS, mesh.size()).positions(rank))

    def is_restored(tensors=given):
        return all(torch.equal(t, old) for t, old in zip(given, before, strict=True) if any(t is x for x in tensors))

    with api.context_parallel(mesh, buffers=given, buffer_seq_dims=dims):
        for tensor, old, dim in zip(given, before, dims, strict=True):
            assert torch.equal(tensor, old.index_select(dim, position))
        again = api.context_parallel_unshard(mesh, given, dims)
        assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True))
        inputs.zero_()  # what is done to a shard is lost, as in PyTorch
    assert is_restored()
    assert [(t.data_ptr(), t.stride()) for t in given] == places
    try:
        with api.context_parallel(mesh, buffers=given, buffer_seq_dims=dims):
            raise KeyError("from inside")
    except KeyError:
        assert is_restored()
    with api.context_parallel(mesh, buffers=given, buffer_seq_dims=dims, no_restore_buffers={table}):
        pass
    assert torch.equal(table, before[2][position])
    assert is_restored([inputs, labels, flags])
    assert torch.equal(api.context_parallel_unshard(mesh, [table], [0])[0], before[2])
    return "done"


def nested():
    """A context over all ranks, in it one over this rank alone, and a thread with a context of its own."""
    mesh, (q, k, v, _) = mesh_of_all(), whole()
    groups = [dist.new_group([r]) for r in range(mesh.size())]
    alone = type(mesh).from_group(groups[dist.get_rank()], "cpu", mesh_dim_names=("alone",))
    one = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    results = {}

    def other():
        results["none"] = F.scaled_dot_product_attention(*whole()[:3], is_causal=True)
        with api.context_parallel(alone, mask=ls.masks.causal()):
            results["own"] = F.scaled_dot_product_attention(*whole()[:3])

    with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        outer = F.scaled_dot_product_attention(q, k, v)
        with api.context_parallel(alone, mask=ls.masks.causal(), seq_len=TOKENS):
            results["inner"] = F.scaled_dot_product_attention(*whole()[:3])
        thread = threading.Thread(target=other)
        thread.start()
        after = F.scaled_dot_product_attention(q, k, v)
        thread.join(30)
    assert torch.equal(outer, after)
    assert results.keys() == {"none", "own", "inner"}
    errors = [float((result - one).abs().max()) for result in results.values()]
    return [*errors, errors_of(mesh, api.HeadTail(), whole(), ls.masks.full(), [outer])]


def inherited():
    """Wrapped modules and inner contexts take what they were not told from the context they are in."""
    mesh, tensors, errors = mesh_of_all(), whole(), []
    documents, window = ls.masks.documents(LENGTHS), ls.masks.sliding_window(3)
    module = parallelize_module(Sdpa(), mesh, api.ContextParallel())
    q, k, v, other = (t.clone() for t in tensors)
    options = {"load_balancer": api.PerDocument(LENGTHS), "mask": documents}
    with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3, **options):
        errors.append(errors_of(mesh, None, tensors, documents, [module(q, k, v)]))
        with api.context_parallel(mesh, buffers=[other], buffer_seq_dims=[2]):
            out = F.scaled_dot_product_attention(other, k, v)
            errors.append(errors_of(mesh, None, [tensors[3], *tensors[1:]], documents, [out]))
        with api.context_parallel(mesh, mask=window):
            out = F.scaled_dot_product_attention(q, k, v)
            errors.append(errors_of(mesh, None, tensors, window, [out]))
        short = whole(11)
        with api.context_parallel(mesh, buffers=short, buffer_seq_dims=[2] * 4):  # another sequence
            errors.append(errors_of(mesh, None, whole(11), ls.masks.full(), [Sdpa()(*short[:3])]))
    return errors


def beside():
    """What else may happen in a context: autocast, inference mode, Longspan's own functions, wrapped in wrapped."""
    mesh, tensors = mesh_of_all(), whole(dtype=torch.float32)
    q, k, v, _ = (t.clone() for t in tensors)
    with torch.inference_mode(), api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(q, k, v)
    errors = [errors_of(mesh, api.HeadTail(), tensors, ls.masks.full(), [out])]
    assert torch.equal(q, tensors[0])
    with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(q, k, v.bfloat16()).dtype == torch.bfloat16
            assert F.scaled_dot_product_attention(q.double(), k.double(), v.double()).dtype == torch.float64
        own = ls.attention(*tensors[:3], ls.masks.causal())
        for kernel in ("reference", "flex"):
            errors.append(float((ls.attention(*tensors[:3], ls.masks.causal(), kernel=kernel) - own).abs().max()))
        errors.append(errors_of(mesh, None, tensors, ls.masks.full(), [api.flex_attention(q, k, v)]))
    both = torch.nn.Sequential()
    style = api.ContextParallel()  # contiguous, since that is how inputs are sharded
    both.append(parallelize_module(Joined(), mesh, style))
    parallelize_module(both, mesh, style)
    (shards,) = api.context_parallel_shard(mesh, [torch.stack(tensors[:3])], [3])
    errors.append(errors_of(mesh, api.Contiguous(), tensors, ls.masks.full(), [both(shards)]))
    compiled = torch.compile(both, backend="aot_eager")
    errors.append(errors_of(mesh, api.Contiguous(), tensors, ls.masks.full(), [compiled(shards)]))
    assert not routes()
    return errors


def learned():
    """Gradients of a table that scores look up, asked for inside nested contexts, and those on one device."""
    mesh, tensors = mesh_of_all(), whole()
    table = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()

    def far(score, b, h, i, j):
        return score + table[(i - j).abs()]

    single = [t.clone().requires_grad_() for t in tensors[:3]]
    right = torch.autograd.grad(ls.flex_attention(*single, far, ls.masks.causal()), (table, *single), tensors[3])
    options = {"buffers": (own := [t.clone() for t in tensors]), "buffer_seq_dims": [2] * 4}
    with api.context_parallel(mesh, **options), api.context_parallel(mesh, mask=ls.masks.causal()):
        leaves = [t.clone().requires_grad_() for t in own[:3]]
        out = checkpoint(lambda *x: api.flex_attention(*x, far), *leaves, use_reentrant=False)
        of_table, *found = torch.autograd.grad(out, (table, *leaves), own[3])
        found = api.context_parallel_unshard(mesh, found, [2] * 3)
    return [float((a - b).abs().max()) for a, b in zip((of_table, *found), right, strict=True)]


class Joined(torch.nn.Module):
    def forward(self, qkv):
        return F.scaled_dot_product_attention(*(2 * qkv).mul(0.5))


def flex(world):
    """Flex attention in wrapped modules: documents as a BlockMask, scores by position, gradients."""
    mesh, balancer, found = mesh_of_all(), api.PerDocument(LENGTHS), []
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    blocks = create_block_mask(
        lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=16
    )
    documents = ls.masks.documents(LENGTHS) & ls.masks.causal()

    def far(score, b, h, i, j):
        return score - 0.1 * (i - j).abs() * (h + 1)

    for kind, score_mod in itertools.product((blocks, documents), (None, far)):
        style = api.ContextParallel(2, "flex", load_balancer=balancer)
        module = parallelize_module(Flex(), mesh, style)
        tensors = whole()
        *leaves, dout = api.context_parallel_shard(mesh, tensors, [2] * 4, balancer)
        leaves = [t.requires_grad_() for t in leaves]
        out = module(*leaves, score_mod, kind)
        out.backward(dout)
        mine = [out.detach(), *(t.grad for t in leaves)]
        single = [t.clone().requires_grad_() for t in tensors[:3]]
        right = ls.flex_attention(*single, score_mod, documents)
        right.backward(tensors[3])
        made = api.context_parallel_unshard(mesh, mine, [2] * 4, balancer)
        wanted = [right.detach(), *(t.grad for t in single)]
        error = max(float((a - b).abs().max()) for a, b in zip(made, wanted, strict=True))
        found.append((f"{type(kind).__name__} {score_mod}", error, 1e-12))
        if score_mod is None:
            found.append(("oracle", errors_of(mesh, balancer, tensors, documents, mine), 1e-12))
    return found


class Layer(torch.nn.Module):
    """Projections around attention, in the shape models have."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def layers(how):
    """Errors of a two-layer model's output and input gradient, run as is, checkpointed or compiled in a context, with
    `backward` and `grad`; and what a checkpoint says that is run after the context."""
    mesh = mesh_of_all()
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(), Layer()).double()
    x = torch.randn(1, TOKENS, 16, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    right = model(leaf)
    (wanted,) = torch.autograd.grad(right.square().sum(), leaf)
    run = {
        "plain": model,
        "checkpointed": lambda x: checkpoint(model, x, use_reentrant=False),
        "reentrant": lambda x: checkpoint(model, x, use_reentrant=True),
        "compiled": torch.compile(model, backend="aot_eager") if how == "compiled" else None,
    }[how]
    errors, late = [], "not recomputed"
    with api.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        ways = ("backward", "function", "inputs") if how == "reentrant" else ("backward", "function", "inputs", "grad")
        for way in ways:
            leaf = x.clone().requires_grad_()
            out = run(leaf)
            loss = out.square().sum()
            if way == "backward":
                loss.backward()
            elif way == "function":
                torch.autograd.backward([loss], [torch.ones_like(loss)])
            elif way == "inputs" and how != "reentrant":
                loss.backward(inputs=[leaf])
            elif way == "inputs":
                loss.backward(torch.ones_like(loss))
            gradient = torch.autograd.grad(loss, leaf)[0] if way == "grad" else leaf.grad
            made = api.context_parallel_unshard(mesh, [out.detach(), gradient], [1, 1])
            pairs = zip(made, (right.detach(), wanted), strict=True)
            errors.append(max(float((a - b).abs().max()) for a, b in pairs))
        leaf = x.clone().requires_grad_()
        loss = run(leaf).square().sum()
    if how == "checkpointed":
        try:
            loss.backward()
        except Exception as error:
            late = str(error)
    return errors, late


def by_name(loss, x):
    """A gradient asked for by name, which PyTorch before 2.13 does not take."""
    if minor(torch.__version__) >= (2, 13):
        return torch.autograd.grad(loss, {"x": x}, create_graph=True)
    return {"x": torch.autograd.grad(loss, x, create_graph=True)[0]}


def gradients():
    """Every way to ask for gradients gives inside a context what it gives outside."""
    mesh, found = mesh_of_all(), []

    def asked():
        x, unused = (torch.ones(1, 1, 1, 4, requires_grad=True) for _ in range(2))
        y = 3 * x
        loss = checkpoint(lambda y: y.sin() * 2, y, use_reentrant=False).square()
        loss.sum().backward(inputs=[y], retain_graph=True)
        ones = torch.ones_like(loss)
        torch.autograd.backward(loss, ones, inputs=x, retain_graph=True)
        both = torch.autograd.grad(loss.sum(), [x, unused], allow_unused=True, retain_graph=True)
        zeros = torch.autograd.grad(loss, [x, unused], ones, materialize_grads=True, retain_graph=True)
        named = by_name(loss.sum(), x)
        twice = torch.autograd.grad(named["x"].sum(), x)
        batched = torch.autograd.grad((3 * x).sin(), x, torch.stack([ones, 2 * ones]), is_grads_batched=True)
        says = refused(lambda: torch.autograd.grad(ones.sum(), x))
        return [y.grad, x.grad, both[0], both[1], *zeros, named["x"], *twice, *batched], says

    wanted, said = asked()
    with api.context_parallel(mesh):
        made, says = asked()
    assert says == said != "not refused"
    for a, b in zip(made, wanted, strict=True):
        found.append((a is None and b is None) or torch.equal(a, b))
    return found


def dtensors_and_copies():
    """DTensors in, DTensor out; a copy of a wrapped module is wrapped too; inputs of any lengths."""
    mesh, tensors = mesh_of_all(), whole()
    module = parallelize_module(Sdpa(), mesh, api.ContextParallel(load_balancer=api.Contiguous()))
    own = api.context_parallel_shard(mesh, tensors[:3], [2] * 3)
    shape = tensors[0].shape
    placed = [DTensor.from_local(t, mesh, (Shard(2),), shape=shape, stride=t.stride()) for t in own]
    out = copy.deepcopy(module)(*placed, is_causal=True)
    assert isinstance(out, DTensor)
    errors = [errors_of(mesh, api.Contiguous(), tensors, ls.masks.causal(), [out.to_local()])]
    rank, cut = dist.get_rank(), 5  # one rank has 5 tokens, the last all that are left
    edges = [*range(0, cut * mesh.size(), cut), TOKENS]
    odd = [t[:, :, edges[rank] : edges[rank + 1]] for t in tensors[:3]]
    out = module(*odd, is_causal=True)
    errors.append(errors_of(mesh, api.Contiguous(), tensors, ls.masks.causal(), [out]))
    return errors


def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def unseen():
    """What contexts say at exit, by what was computed inside."""
    mesh, length = mesh_of_all(), 64
    layout = ls.layouts.zigzag(length, mesh.size())
    plan = ls.plan(ls.masks.causal(), layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")

    def routed(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def flex(q, k, v):
        return torch_flex(q, k, v)

    def planned(q, k, v):
        return ls.attention(q, k, v, plan, group=mesh)

    def planned_inside(q, k, v):
        with api.context_parallel(mesh):
            return planned(q, k, v)

    def in_a_thread(q, k, v):
        results = []
        thread = threading.Thread(target=lambda: results.append(F.scaled_dot_product_attention(q, k, v)))
        thread.start()
        thread.join()
        return results[0]

    def eager(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    def forward_only(q, k, v):
        return eager(q, k, v).detach()

    def run(case):
        buffers = [t.clone() for t in torch.randn(3, 1, 2, length, 8)]
        with api.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            out = quiet(case, *(t.clone().requires_grad_() for t in buffers))
            if out.requires_grad:
                out.sum().backward()

    compiled = torch.compile(planned, backend="aot_eager")
    cases = {f.__name__: f for f in (routed, flex, planned, planned_inside, in_a_thread, eager, forward_only)}
    return {name: refused(partial(run, case)) for name, case in {**cases, "compiled": compiled}.items()}


def layouts():
    """How shards are put together again, and how modules and contexts take them: with the balancer, and without."""
    mesh, found = mesh_of_all(), []
    rank, x = mesh.get_local_rank(), whole()[0]
    right = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    own = ls.layouts.striped(TOKENS, mesh.size(), stripe=3)
    balancers = [(None, True), (api.Contiguous(), True), (api.HeadTail(), True)]
    balancers += [(api.PerDocument(LENGTHS), False), (own, False)]
    style = parallelize_module(Sdpa(), mesh, api.ContextParallel())

    def ended(call, *args):
        try:
            return float((call(*args) - right).abs().max()) < 1e-12
        except ls.LongspanError as error:
            return str(error)

    def unsharded(shard, balancer=None):
        return api.context_parallel_unshard(mesh, [shard], [2], balancer)[0]

    def attended(shard, balancer=None, module=style):
        return unsharded(module(shard, shard, shard, is_causal=True), balancer)

    for balancer, is_known in balancers:
        (shard,) = api.context_parallel_shard(mesh, [right], [2], balancer)
        told = balancer or api.Contiguous()
        found.append((f"{balancer}: told", ended(unsharded, 1 * shard, told), True))
        cases = {"unshard": (unsharded, 1 * shard)}
        (shard,) = api.context_parallel_shard(mesh, [x], [2], balancer)
        cases["style"] = attended, 1 * shard, told
        for name, call in cases.items():
            found.append((f"{balancer}: {name}", ended(*call), True if is_known else "must be passed"))
    # What a shard says of itself is compared.
    (shard,) = api.context_parallel_shard(mesh, [x], [2], api.PerDocument(LENGTHS))
    module = parallelize_module(Sdpa(), mesh, api.ContextParallel(load_balancer=api.Contiguous()))
    found.append(("another layout", ended(unsharded, shard, api.Contiguous()), "was sharded by"))
    found.append(("another layout, style", ended(attended, shard, None, module), "was sharded by"))
    # The placement of a DTensor is contiguous; the option must not say otherwise.
    cp_options().enable_load_balance = False
    part = api.Contiguous().layout(TOKENS, mesh.size()).shard(x, rank, 2)
    placed = DTensor.from_local(part, mesh, (Shard(2),), shape=x.shape, stride=x.stride())
    found.append(("DTensors", ended(lambda: style(placed, placed, placed, is_causal=True).full_tensor()), True))
    cp_options().enable_load_balance = True
    found.append(("DTensors, balanced", ended(lambda: style(placed, placed, placed)), "must be passed for DTensors"))
    with api.context_parallel(mesh, load_balancer=own, seq_len=TOKENS):
        (shard,) = api.context_parallel_shard(mesh, [x], [2])
        found.append(("in a context", ended(attended, 1 * shard), True))
    return found


def without_differentiate():
    """How checkpoints end if backward runs without the mode: (reentrant, how)."""
    mesh, found = mesh_of_all(), {}
    x, before = torch.randn(1, TOKENS, 16, dtype=torch.float64), Router._differentiate
    torch.manual_seed(0)
    model = Layer().double()
    try:
        for is_reentrant in (True, False):
            gradients = []
            for handler in (before, lambda _, func, args, kwargs: func(*args, **kwargs)):
                Router._differentiate = handler
                buffer = x.clone()
                with api.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                    leaf = buffer.clone().requires_grad_()
                    loss = checkpoint(model, leaf, use_reentrant=is_reentrant).square().sum()
                    error = refused(loss.backward)
                    gradients.append(leaf.grad)
            found[is_reentrant] = error if gradients[1] is None else float((gradients[0] - gradients[1]).abs().max())
    finally:
        Router._differentiate = before
    return found


def refusals():
    """What each refused call says, by name."""
    mesh, (q, k, v, _) = mesh_of_all(), whole(dtype=torch.float32)
    plane = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
    sdpa = F.scaled_dot_product_attention

    def enter(where=mesh, **options):
        with api.context_parallel(where, **options):
            pass

    both = {"buffers": [q, k], "buffer_seq_dims": [2, 2]}
    padded = ls.layouts.zigzag(TOKENS, mesh.size(), equal_tokens=True)
    found = {
        "mesh": refused(lambda: enter(plane)),
        "dims": refused(lambda: enter(buffers=[q], buffer_seq_dims=[])),
        "twice": refused(lambda: enter(buffers=[q, q], buffer_seq_dims=[2, 2])),
        "lengths": refused(lambda: enter(buffers=[q, k], buffer_seq_dims=[2, 3])),
        "grad": refused(lambda: enter(buffers=[q.clone().requires_grad_()], buffer_seq_dims=[2])),
        "subset": refused(lambda: enter(**both, no_restore_buffers={v})),
        "mask": refused(lambda: enter(**both, mask=ls.masks.documents([3, 4]))),
        "kind of mask": refused(lambda: enter(**both, mask=torch.ones(2, 2))),
        "balancer": refused(lambda: enter(**both, load_balancer=True)),
        "documents": refused(lambda: enter(**both, load_balancer=api.PerDocument([3, 4]))),
        "padding": refused(lambda: enter(**both, load_balancer=padded)),
        "padding of labels": refused(lambda: api.context_parallel_shard(mesh, [torch.arange(TOKENS)], [0], padded)),
        "dims by name": refused(lambda: api.context_parallel_shard(mesh, [q], {"q": 2})),
        "rotation": refused(lambda: api.set_rotate_method("carrier pigeon")),
        "type": refused(lambda: api.ContextParallel(attention_type="linear")),
        "no attention": refused(lambda: parallelize_module(Local(), mesh, api.ContextParallel())(q, k, v)),
        "unshard": refused(lambda: unshard_balanced(mesh, q[:, :, dist.get_rank() * 9 :])),
        "placement": refused(
            lambda: parallelize_module(Sdpa(), mesh, api.ContextParallel())(
                *[DTensor.from_local(t, mesh, (Shard(1),)) for t in (q, k, v)]
            )
        ),
    }
    with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        found |= {
            "attn_mask": refused(lambda: sdpa(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool))),
            "dropout": refused(lambda: sdpa(q, k, v, dropout_p=0.1)),
            "heads": refused(lambda: sdpa(q, k[:, :1], v[:, :1])),
            "tokens": refused(lambda: sdpa(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])),
            "cross": refused(lambda: sdpa(q[:, :, 1:], k, v)),
            "dims of q": refused(lambda: sdpa(q[0], k[0], v[0])),
            "multihead": refused(lambda: torch.nn.MultiheadAttention(8, 2)(q[0], q[0], q[0])),
            "varlen": refused(lambda: varlen_attn(q[0, 0], k[0, 0], v[0, 0], *[torch.tensor([0, 9])] * 2, 9, 9)),
            "flex": refused(lambda: quiet(torch_flex, q, k, v, lambda s, *_: s, local_blocks(q.shape[2]))),
            "local blocks": refused(lambda: api.flex_attention(q, k, v, block_mask=local_blocks(q.shape[2]))),
        }
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            found["kernel"] = refused(lambda: sdpa(q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            by_math = sdpa(q, k, v)
        found["math"] = float((by_math - sdpa(q, k, v)).abs().max())
    return found


def unshard_balanced(mesh, shard):
    cp_options().enable_load_balance = True
    api.context_parallel_unshard(mesh, [shard], [2])


def quiet(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def local_blocks(tokens):
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=16)
