"""What ranks run in tests/breaks/test_torch_api.py; importable by name, as worker processes need it."""

import contextlib
import itertools
import warnings
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex_module
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan import torch_api
from longspan._torch import cp_options
from longspan.torch_api import routes

RIGHT, REFUSED, WRONG = "right", "refused", "wrong"


def world_mesh():
    """A mesh of all ranks, and the options of a new process."""
    cp_options().enable_load_balance = True
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def outcome(expected, limit, function, *args):
    """Return how a call ended: right, refused by Longspan, or wrong (also by another exception), and why."""
    try:
        result = function(*args)
    except ls.LongspanError as error:
        return REFUSED, str(error)
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {error}"
    error = float((result.double() - expected.double()).abs().max()) if result.shape == expected.shape else np.inf
    return (RIGHT, "") if error <= limit else (WRONG, f"off by {error:.1e}")


def drawn(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- gradients of DTensors --------------------------------------------------------------------------------------------


def described(value):
    """A gradient as something to compare: its kind, its placements and its whole."""
    if isinstance(value, DTensor):
        return "DTensor", tuple(value.placements), value.full_tensor().detach()
    return type(value).__name__, (), None if value is None else value.detach()


def programs(mesh):
    """Ways to ask for gradients of DTensors: functions without arguments that return what they got."""

    def leaf(seed=0, placement=Shard(0)):  # noqa: B008
        return distribute_tensor(drawn(seed, 8, 8), mesh, [placement]).requires_grad_()

    def losses(w):
        """Scalars with each kind of placement."""
        total = (w * w).sum()
        local = w.to_local().square().sum()
        return {
            "sum": total,
            "linear": (2 * w).sum(),
            "replicated": total.redistribute(mesh, [Replicate()]),
            "partial": DTensor.from_local(local, mesh, [Partial()]),
            "one by one": total.reshape(1, 1),
        }

    def backward(kind, placement):
        w = leaf(placement=placement)
        losses(w)[kind].backward()
        return [w.grad]

    def checkpointed():
        w = leaf()
        checkpoint(lambda w: (w.sin() * w).sum(), w, use_reentrant=False).backward()
        return [w.grad]

    def function(gradient):
        w, y = leaf(), leaf(1)
        loss = (w * y).sum()
        torch.autograd.backward([loss, (w * w).sum()], [torch.full_like(loss, 3.0) if gradient else None, None])
        return [w.grad, y.grad]

    def with_inputs():
        w, y = leaf(), leaf(1)
        hidden = w * y
        hidden.square().sum().backward(inputs=[w, hidden], retain_graph=True)
        hidden.square().sum().backward(inputs=y)
        return [w.grad, y.grad, hidden.grad]

    def twice():
        w = leaf()
        loss = (w * w).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [w.grad]

    def grad(**options):
        w, y, unused = leaf(), leaf(1), leaf(2)
        return torch.autograd.grad((w * w * y).sum(), [w, y, unused], **options)

    def second():
        w = leaf()
        (first,) = torch.autograd.grad((w * w * w).sum(), w, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), w)]

    def mixed():
        """A plain root and one that is a DTensor."""
        w, x = leaf(), drawn(3, 4).requires_grad_()
        torch.autograd.backward([(w * w).sum(), (x * x).sum()])
        return [w.grad, x.grad]

    def of_vector():
        w = leaf()
        loss = (w * w).sum(0)
        loss.backward(torch.ones_like(loss))
        return [w.grad]

    def wrong(how):
        w = leaf()
        try:
            if how == "no scalar":
                (w * w).backward()
            elif how == "shape":
                (w * w).sum().backward(distribute_tensor(torch.ones(3, dtype=torch.float64), mesh, [Replicate()]))
            else:
                torch.autograd.backward([(w * w).sum(), (2 * w).sum()], [None])
        except Exception as error:
            return [f"{type(error).__name__}: {error}".splitlines()[0]]
        return ["no error", w.grad]

    kinds = ("sum", "linear", "replicated", "partial", "one by one")
    placements = (Shard(0), Shard(1), Replicate())
    found = {f"{kind} {where}": partial(backward, kind, where) for kind, where in itertools.product(kinds, placements)}
    found |= {"checkpointed": checkpointed, "inputs": with_inputs, "twice": twice, "second": second, "mixed": mixed}
    found |= {"function": lambda: function(False), "gradient": lambda: function(True), "vector": of_vector}
    found |= {
        "grad": lambda: grad(allow_unused=True),
        "zeros": lambda: grad(materialize_grads=True),
        "zeros with a graph": lambda: grad(materialize_grads=True, create_graph=True),
    }
    return found | {how: partial(wrong, how) for how in ("no scalar", "shape", "too few")}


def same(a, b):
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    (kind, placed, x), (other, where, y) = described(a), described(b)
    equal = x is y if x is None or y is None else torch.equal(x, y)
    return (
        kind == other and placed == where and equal and getattr(a, "requires_grad", 0) == getattr(b, "requires_grad", 0)
    )


def gradients_of_dtensors():
    """Each program inside a context gives what it gives outside: kind, placement, values, words of refusals."""
    mesh, found = world_mesh(), []
    for name, program in programs(mesh).items():
        outside = program()
        for nesting in (1, 2):
            with contextlib.ExitStack() as stack:
                for _ in range(nesting):
                    stack.enter_context(torch_api.context_parallel(mesh, seq_len=64))
                try:
                    inside = program()
                except Exception as error:
                    inside = [f"{type(error).__name__}: {error}"]
            is_same = len(inside) == len(outside) and all(map(same, inside, outside))
            found.append((f"{name}, {nesting} deep", RIGHT, RIGHT if is_same else WRONG, str(inside)[:300]))
    return found


class Tp(nn.Module):
    """One layer with a vocabulary of 32, in the shape of models under tensor parallelism."""

    def __init__(self):
        super().__init__()
        sizes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "o": (16, 16), "head": (16, 32)}
        for number, (name, size) in enumerate(sizes.items()):
            setattr(self, name, nn.Linear(*size, dtype=torch.float64))
            with torch.no_grad():
                getattr(self, name).weight.copy_(drawn(number, *size[::-1]) / 4)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.head(x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))


def tensor_parallel(how, checkpointed):
    """Context parallelism x tensor parallelism, with the loss over a sharded vocabulary: errors of all gradients and of
    the loss against one device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    x, y = drawn(8, 2, 32, 16), torch.randint(0, 32, (2, 32), generator=torch.Generator().manual_seed(9))
    torch.manual_seed(0)
    one = Tp()
    expected = F.cross_entropy(one(x).flatten(0, 1), y.flatten(), reduction="sum")
    expected.backward()
    torch.manual_seed(0)
    columns = {name: ColwiseParallel() for name in "qkv"}
    model = parallelize_module(
        Tp(), mesh["tp"], columns | {"o": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
    )
    run = (lambda x: checkpoint(model, x, use_reentrant=False)) if checkpointed else model
    with torch_api.context_parallel(mesh["cp"], buffers=[x, y], buffer_seq_dims=[1, 1]), loss_parallel():
        loss = F.cross_entropy(run(x).flatten(0, 1), y.flatten(), reduction="sum")
        assert isinstance(loss, DTensor)
        weights = dict(model.named_parameters())
        if how == "backward":
            loss.backward()
        elif how == "function":
            torch.autograd.backward(loss)
        elif how == "inputs":
            loss.backward(inputs=list(weights.values()))
        else:
            for weight, gradient in zip(
                weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True
            ):
                weight.grad = gradient
    errors = {}
    for name, weight in one.named_parameters():
        gradient = weights[name].grad
        assert type(gradient) is type(weights[name])
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
        dist.all_reduce(full, group=mesh["cp"].get_group())  # each has its tokens' share
        errors[name] = float((full - weight.grad).abs().max())
    total = loss.full_tensor().detach()
    dist.all_reduce(total, group=mesh["cp"].get_group())
    return errors | {"loss": float((total - expected).abs())}


# -- flex attention of PyTorch ----------------------------------------------------------------------------------------


class Flex(nn.Module):
    """A module that calls PyTorch's flex attention, or a compiled one."""

    def __init__(self, function=torch_flex, **options):
        super().__init__()
        self.function, self.options = function, options
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, q, k, v):
        return self.function(q * self.scale, k, v, **self.options) + 0.0


def causal_blocks(tokens):
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cpu")


def calls_of_flex(length):
    """Ways to call PyTorch's flex attention, by name; `length` is that of the block mask, None for no mask."""
    options = {} if length is None else {"block_mask": causal_blocks(length)}

    def compiled(function):
        return torch.compile(function, backend="eager")  # what differs is how it is traced, not what is made of it

    return {
        "by name": lambda q, k, v: torch_flex(q, k, v, **options),
        "of the module": lambda q, k, v: flex_module.flex_attention(query=q, key=k, value=v, **options),
        "in a module": Flex(**options),
        "compiled": lambda q, k, v: compiled(torch_flex)(q, k, v, **options),
        "in a compiled module": compiled(Flex(**options)),
        "compiled in a module": Flex(compiled(torch_flex), **options),
        "in a compiled function": compiled(lambda q, k, v: 2 * torch_flex(q.sin(), k, v, **options)),
        "with a score function": lambda q, k, v: torch_flex(q, k, v, lambda s, b, h, i, j: s + i - j, **options),
        "compiled with one": compiled(lambda q, k, v: torch_flex(q, k, v, lambda s, b, h, i, j: s + i - j, **options)),
    }


def refuses_flex(name, call, *tensors):
    try:
        call(*tensors)
    except Exception as error:
        is_ours = isinstance(error, ls.PlanError) and "for the whole sequence" in str(error)
        return name, REFUSED, REFUSED if is_ours else WRONG, f"{type(error).__name__}: {error}"[:300]
    return name, REFUSED, WRONG, "no error"


def flex_in_contexts(cases, names=None):
    """PyTorch's flex attention is over the whole sequence inside a context, or refused if its block mask is not, and
    computes what it computes before and after contexts, also those that ended by an exception. A case is the length of
    a block mask, or None, and whether the call was compiled outside before; `names` are of some ways to call it."""
    mesh, found, tokens = world_mesh(), [], 256
    whole = [drawn(i, 1, 2, tokens, 16, dtype=torch.float32) for i in range(3)]
    local = [t[:, :, : tokens // mesh.size()].clone() for t in whole]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about speed
        for length, is_warm in cases:
            for name, call in calls_of_flex(length).items():
                if names is not None and name not in names:
                    continue
                torch.compiler.reset()
                label = f"{name}, mask of {length}, {'warm' if is_warm else 'cold'}"
                inputs = whole if length == tokens else local
                before = call(*inputs) if is_warm else None
                q, k, v = (t.clone() for t in whole)
                with torch_api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
                    if length not in (None, tokens):
                        found.append(refuses_flex(label, call, q, k, v))
                    else:
                        (out,) = torch_api.context_parallel_unshard(mesh, [call(q, k, v)], [2])
                        right, limit = flex_of_one(name, whole, length)
                        found.append((label, RIGHT, *outcome(right, limit, lambda x: x, out)))
                with contextlib.suppress(ValueError), torch_api.context_parallel(mesh, seq_len=tokens):
                    call(*local)
                    raise ValueError("from inside")
                if is_warm:
                    found.append((f"{label}, after", RIGHT, *outcome(before, 0, call, *inputs)))
        if names is None:
            found.append(flex_in_style(mesh, whole))
            found += flex_that_is_ours(mesh, whole)
    return found


def flex_of_one(name, whole, length):
    """What a call of `calls_of_flex` returns on one device, by dense float64 math, and how far off float32 may be."""
    q, k, v = (t.double() for t in whole)
    i = torch.arange(q.shape[2])
    if name == "in a compiled function":
        q = q.sin()
    scores, limit = q @ k.mT / q.shape[3] ** 0.5, 4e-6
    if name in ("with a score function", "compiled with one"):
        scores = scores + (i[:, None] - i)
        limit += 2 * float(scores.abs().max() * v.abs().max()) * torch.finfo(torch.float32).eps  # scores are rounded
    if length is not None:
        scores = scores.masked_fill(i[:, None] < i, -torch.inf)
    return (2 if name == "in a compiled function" else 1) * (scores.softmax(-1) @ v), limit


def flex_in_style(mesh, whole):
    module = parallelize_module(Flex(block_mask=causal_blocks(256)), mesh, torch_api.ContextParallel(2, "flex"))
    out = module(*torch_api.context_parallel_shard(mesh, whole, [2] * 3))
    (out,) = torch_api.context_parallel_unshard(mesh, [out], [2])
    right, limit = flex_of_one("", whole, 256)
    return "in a style", RIGHT, *outcome(right, limit, lambda x: x, out)


def flex_that_is_ours(mesh, whole):
    """Block masks made inside a context, and flex attention of Longspan there, are as ever."""
    expected, found = F.scaled_dot_product_attention(*whole, is_causal=True), []
    ours = {
        "torch_api": torch_api.flex_attention,
        "compiled torch_api": torch.compile(torch_api.flex_attention, backend="eager"),
        "kernel": lambda *_, **__: ls.attention(*whole, ls.masks.causal(), kernel="flex"),
    }
    for name, function in ours.items():
        q, k, v = (t.clone() for t in whole)
        with torch_api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            out = function(q, k, v, block_mask=causal_blocks(256))
            if name != "kernel":
                (out,) = torch_api.context_parallel_unshard(mesh, [out], [2])
        found.append((name, RIGHT, *outcome(expected, 2e-6, lambda result: result, out)))
    return found


# -- deliberate mistakes ----------------------------------------------------------------------------------------------


MUTANTS = {
    "edges make the root gradient": (routes, "_root_gradients", lambda roots, gradients: gradients),
    "plain root gradients": (
        routes, "_root_gradients",
        lambda roots, gradients: gradients or tuple(torch.ones(t.shape, dtype=t.dtype) for t in roots),
    ),
    "flex keeps its code": (routes, "_count_active", lambda change: None),
    "flex finds no route": (routes, "is_routed", lambda: False),
}  # fmt: skip


def with_mutant(name, function, *args):
    """Run a function with a deliberate mistake planted on this rank."""
    where, attribute, mistake = MUTANTS[name]
    with mock.patch.object(where, attribute, mistake, create=True):
        return function(*args)
