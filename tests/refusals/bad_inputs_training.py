"""Bad batches, losses, layouts and meshes of `longspan.training`."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from longspan import LayoutError, LongspanError, MaskError, layouts, masks
from longspan.training import (
    BatchError,
    Head,
    check_same,
    gather_outputs,
    make_mesh,
    relayout,
    shard_batch,
    shard_like,
    shift_tokens,
    token_logprobs,
    token_loss,
)
from tests.refusals.bad_inputs import NAN, bad, mesh, one_rank

LAYOUT = layouts.zigzag(8, 2)
ONE = layouts.contiguous(8, 1)
IDS = torch.arange(8)
LOGITS, LABELS = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)


def shard(batch, rank=0, layout=LAYOUT, **kwargs):
    return shard_batch(batch, layout, rank, **kwargs)


def loss(logits=LOGITS, labels=LABELS, group=None, gradients="sum", **kwargs):
    return token_loss(logits, labels, group=group, gradients=gradients, **kwargs)


def _batches():
    for name in ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids"):
        for value in ([0] * 8, None, "ids", np.arange(8)):
            says = f"{name} must be a tensor, but is {type(value).__name__}", "Collate the batch first"
            yield bad(f"{name} {type(value).__name__}", lambda n=name, v=value: shard({n: v}), BatchError, *says)
        for shape in ((7,), (2, 9), ()):
            says = f"{name} has shape {shape}", "the 8 tokens of", "Pass whole tensors, not shards"
            zeros = torch.zeros(shape, dtype=torch.int64)
            yield bad(f"{name} {shape}", lambda n=name, v=zeros: shard({n: v}), BatchError, *says)
    both = {"labels": IDS, "shift_labels": IDS}
    yield bad("labels twice", lambda: shard(both), BatchError, "shift_labels", "not both")
    mixed = {"input_ids": torch.zeros(2, 8), "labels": torch.zeros(3, 8)}
    yield bad("batch sizes", lambda: shard(mixed), BatchError, "(2, 8), (3, 8)", "must have one shape")
    only = {"loss_mask": torch.ones(8)}
    yield bad("loss_mask alone", lambda: shard(only), BatchError, "without labels", "Add labels")
    yield bad("shifts alone", lambda: shard({"input_ids": IDS}, num_shifts=2), BatchError, "without labels")
    for value in (0, -1, 2.5, "2", None, True):
        says = f"num_shifts = {value!r}", "at least 1 and"
        yield bad(f"num_shifts {value!r}", lambda v=value: shard({"labels": IDS}, num_shifts=v), BatchError, *says)
    weights = {"labels": IDS, "loss_mask": torch.full((8,), 0.5)}
    yield bad("weights", lambda: shard(weights), BatchError, "must hold 0 and 1 only", "shift_tokens")
    nan = {"labels": IDS, "loss_mask": torch.full((8,), NAN)}
    yield bad("nan in loss_mask", lambda: shard(nan), BatchError, "must hold 0 and 1 only")
    ids, placed = {"input_ids": IDS}, {"input_ids": IDS, "position_ids": IDS}
    yield bad("positions", lambda: shard(ids, positions="local"), BatchError, "positions must be", "but got 'local'")
    yield bad("positions twice", lambda: shard(placed, positions="sequence"), BatchError, "position_ids", "Take one")
    yield bad("no positions", lambda: shard(ids, documents=[8]), BatchError, "no position_ids", "positions='document'")
    more = {"input_ids": IDS, "extra": torch.zeros(3, 8), "mask": torch.zeros(8), "attention_mask": torch.ones(8)}
    one = lambda name: {"input_ids": IDS, name: more[name]}  # noqa: E731
    yield bad("unnamed", lambda: shard(one("extra")), BatchError, "extra of shape (3, 8)", "dims={'extra': 1}")
    says = "attention_mask of shape (8,)", "The plan has the mask of attention"
    yield bad("attention_mask", lambda: shard(one("attention_mask")), BatchError, *says)
    yield bad("dims unknown", lambda: shard(ids, dims={"x": 0}), BatchError, "dims names 'x'", "not in the batch")
    yield bad("dims known", lambda: shard(ids, dims={"input_ids": 0}), BatchError, "known by name")
    wrong = lambda: shard({"input_ids": IDS, "t": 3}, dims={"t": 0})  # noqa: E731
    yield bad("dims of a number", wrong, BatchError, "dims names 't', which is not a tensor but int")
    yield bad("dims dim", lambda: shard(one("extra"), dims={"extra": 0}), LayoutError, "shape (3, 8)", "dim = 0")
    yield bad("dims float", lambda: shard(one("extra"), dims={"extra": 0.5}), LayoutError, "dim = 0.5", "an integer")
    yield bad("fills", lambda: shard(ids, fills={"extra": 1}), BatchError, "fills names 'extra'", "Add it to dims")
    for rank in (2, -1):
        yield bad(f"rank {rank}", lambda r=rank: shard(ids, r), LayoutError, f"rank must be in [0, 2), but got {rank}")
    yield bad("rank 'a'", lambda: shard(ids, "a"), LayoutError, "rank = 'a'", "an integer")
    for value in ([IDS], None, "batch", 3):
        says = "takes a mapping of names to tensors", type(value).__name__
        yield bad(f"batch {type(value).__name__}", lambda v=value: shard(v), BatchError, *says)
    for value in (None, 8, "zigzag"):
        says = "takes a layout", type(value).__name__
        yield bad(f"layout {type(value).__name__}", lambda v=value: shard(ids, layout=v), BatchError, *says)


def _documents():
    ids = {"input_ids": IDS}
    for name, value, error, *says in (
        ("short", [3, 4], BatchError, "add up to 7, but the sequence has 8", "loss_mask"),
        ("long", [8, 1], BatchError, "add up to 9, but the sequence has 8"),
        ("negative", [9, -1], MaskError, "document 1 has length -1"),
        ("floats", [4.0, 4.0], MaskError, "flat list of whole numbers"),
        ("rows", [[8], [4, 4]], BatchError, "documents must be", "got 2 lists for 1 batch rows"),
        ("a text", "4 4", LongspanError, "documents = '4 4'", "a list of lengths per batch row, or a mask"),
        ("a number", 8, LongspanError, "documents = 8", "a list of lengths per batch row, or a mask"),
        ("a set", {3, 1}, LongspanError, "documents = {1, 3}", "a list of lengths per batch row, or a mask"),
        (
            "a function",
            masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 8),
            BatchError,
            "a function decides",
            "lengths",
        ),
        ("another mask", masks.causal(9), MaskError, "is for 9 tokens"),
    ):
        call = lambda v=value: shard(ids, documents=v, positions="document")  # noqa: E731
        yield bad(f"documents {name}", call, error, *says)
    for value in (-1, 0.5, "1", None, True):
        says = f"shift = {value!r}", "at least 0"
        yield bad(f"shift {value!r}", lambda v=value: shift_tokens(IDS, v), BatchError, *says)
    for dtype, limits in ((torch.uint8, "from 0 to 255"), (torch.bool, "from 0 to 1")):
        narrow, says = IDS.to(dtype), (limits, str(dtype).removeprefix("torch."), "but got -100", "int64")
        yield bad(f"shift {dtype}", lambda x=narrow: shift_tokens(x, 1, fill=-100), BatchError, "fill must be", *says)
        yield bad(
            f"narrow labels {dtype}", lambda x=narrow: shard({"labels": x}), BatchError, "ignore_index must be", *says
        )
        like = lambda x=narrow: shard_like(x, LAYOUT, 0, shift=0, fill=-100)  # noqa: E731
        yield bad(f"shard_like {dtype}", like, LayoutError, "fill must be", *says)
        whole = lambda x=narrow: LAYOUT.shard(x, 0, dim=-1, fill=-100)  # noqa: E731
        yield bad(f"Layout.shard {dtype}", whole, LayoutError, "fill must be", *says)
    yield bad("shift a list", lambda: shift_tokens([1], 1), BatchError, "x must be a tensor", "list")
    yield bad("shift a number", lambda: shift_tokens(torch.zeros(()), 1), BatchError, "x must be a tensor", "()")


def _losses():
    for value in ("mean", None, 1, "Sum"):
        yield bad(
            f"gradients {value!r}",
            lambda v=value: loss(gradients=v),
            BatchError,
            "gradients must be 'sum'",
            f"{value!r}",
        )
    for value in ("none", None, "avg"):
        yield bad(
            f"reduction {value!r}",
            lambda v=value: loss(reduction=v),
            BatchError,
            "reduction must be 'mean'",
            f"{value!r}",
        )
    yield bad("both", lambda: loss(reduction="sum", num_tokens=3), BatchError, "num_tokens", "Leave one")
    for value in (NAN, "3", -1, True, [3], torch.tensor(-4)):
        says = ("num_tokens must be a number >= 0",)
        yield bad(f"num_tokens {value!r}", lambda v=value: loss(num_tokens=v), BatchError, *says)
    for shape in ((5,), (4, 1), (2, 2), ()):
        labels = torch.zeros(shape, dtype=torch.int64)
        says = "logits of shape (4, 5) need labels of shape (4,)", f"{shape}"
        yield bad(f"loss labels {shape}", lambda v=labels: loss(labels=v), BatchError, *says)
    for word, value in (("logits", [1.0]), ("logits", None), ("labels", [1]), ("labels", np.zeros(4))):
        says = f"{word} must be a tensor", type(value).__name__
        yield bad(f"loss {word} {type(value).__name__}", lambda w=word, v=value: loss(**{w: v}), BatchError, *says)
    for value in (torch.zeros(4), torch.zeros(4, dtype=torch.bool)):
        says = "labels must be integers", str(value.dtype)
        yield bad(f"labels {value.dtype}", lambda v=value: loss(labels=v), BatchError, *says)
    ints = torch.zeros(4, 5, dtype=torch.int64)
    yield bad("logits int64", lambda: loss(logits=ints), BatchError, "logits must be floating-point", "torch.int64")
    yield bad("a label too large", lambda: loss(labels=LABELS + 5), BatchError, "labels run from 5 to 5", "0 to 4")
    yield bad(
        "a label below 0", lambda: loss(labels=LABELS - 3), BatchError, "labels run from -3 to -3", "ignore_index"
    )
    for value in ("world", 3, [0]):
        says = "token_loss needs a process group or a mesh of one axis", type(value).__name__
        yield bad(f"group {type(value).__name__}", lambda v=value: loss(group=v), BatchError, *says)
    two = lambda: loss(group=mesh("dp", "cp"))  # noqa: E731
    yield bad("two axes", two, BatchError, "a mesh of 2 axes ('dp', 'cp')", "mesh['cp']")


def _heads():
    hidden, weight = torch.zeros(4, 3), torch.zeros(5, 3)
    for value in ("weight", 3, nn.Embedding(5, 3), [weight]):
        says = "head must be a Head", type(value).__name__, "nn.Linear"
        yield bad(f"head {type(value).__name__}", lambda v=value: loss(hidden, head=v), BatchError, *says)
    for value in (torch.zeros(5), torch.zeros(5, 3, 1)):
        says = "weight of a head must be (vocab_size, hidden_size)", f"{tuple(value.shape)}"
        yield bad(f"head {tuple(value.shape)}", lambda v=value: loss(hidden, head=v), BatchError, *says)
    ints = weight.to(torch.int8)
    yield bad("head int8", lambda: loss(hidden, head=ints), BatchError, "has dtype torch.int8", "Dequantize it first")
    for value in (torch.zeros(4), torch.zeros(5, 1), torch.zeros(5, dtype=torch.float64)):
        says = "bias of a head must have shape (5,) and dtype torch.float32", f"{tuple(value.shape)}"
        yield bad(f"bias {tuple(value.shape)} {value.dtype}", lambda v=value: Head(weight, v), BatchError, *says)
    for name, values in {
        "scale": (NAN, "1", None, torch.ones(1)),
        "soft_cap": (0, -1.0, NAN),
        "temperature": (0, None),
    }.items():
        for value in values:
            says = f"{name} of a head must be a number", "but got"
            yield bad(f"{name} {value!r}", lambda n=name, v=value: Head(weight, **{n: v}), BatchError, *says)
    yield bad("head group", lambda: Head(weight, group=3), BatchError, "Head needs a process group")
    says = "do not fit a head of vocab_size=5 and hidden_size=3", "not logits"
    yield bad("width", lambda: loss(torch.zeros(4, 5), head=weight), BatchError, *says)
    says = "hidden states are torch.bfloat16", "the head is torch.float32", "torch.autocast"
    yield bad("head dtype", lambda: loss(hidden.bfloat16(), head=weight), BatchError, *says)
    says = "hidden states of shape (4, 3) need labels of shape (4,)", "(2,)"
    yield bad("head labels", lambda: loss(hidden, LABELS[:2], head=weight), BatchError, *says)
    for name, call in {"loss": loss, "logprobs": lambda *a, **k: token_logprobs(*(a or (hidden,)), **k)}.items():
        says = "labels run from 5 to 5, but logits are for 0 to 4", "ignore_index = -100"
        yield bad(f"{name} label", lambda c=call: c(hidden, labels=LABELS + 5, head=weight), BatchError, *says)
        says_list = "hidden states must be a"
        yield bad(f"{name} list", lambda c=call: c([1.0], labels=LABELS, head=weight), BatchError, says_list)
    for name, values in {"label_smoothing": (-0.1, 1.5, NAN, "0.1"), "z_loss": (-1, NAN, None)}.items():
        for value in values:
            yield bad(
                f"{name} {value!r}", lambda n=name, v=value: loss(**{n: v}), BatchError, f"{name} must be", "a number"
            )


def _moving():
    x = torch.zeros(8)
    for name, call in {
        "relayout": lambda group: relayout(x, ONE, ONE, group, 0),
        "gather_outputs": lambda group: gather_outputs(x, ONE, group, 0),
        "check_same": lambda group: check_same({"x": x}, group),
    }.items():
        for value in (None, "world", 3, object()):
            kind = type(value).__name__
            says = f"{name} needs a process group or a mesh of one axis", kind, "group.WORLD"
            yield bad(f"{name} {kind}", lambda c=call, v=value: c(v), BatchError, *says)
        says = f"{name} got a mesh of 2 axes", "Pass one axis"
        yield bad(f"{name} two axes", lambda c=call: c(mesh("dp", "cp")), BatchError, *says)
    for name, call in {
        "relayout": lambda layout, x, dim: relayout(x, layout, layout, one_rank(), dim),
        "gather_outputs": lambda layout, x, dim: gather_outputs(x, layout, one_rank(), dim),
    }.items():
        says = (
            f"{name} got <layout zigzag, 8 tokens on 2 ranks> and a group of 1 ranks",
            "Make the layout for the group",
        )
        yield bad(f"{name} ranks", lambda c=call: c(LAYOUT, x, 0), BatchError, *says)
        says = "the shard of rank 0 must have 8 slots", "(7,)"
        yield bad(f"{name} tokens", lambda c=call: c(ONE, torch.zeros(7), 0), LayoutError, *says)
        yield bad(f"{name} dim", lambda c=call: c(ONE, x, 1), LayoutError, "dim = 1", "Pass the dim")
        yield bad(f"{name} list", lambda c=call: c(ONE, [0] * 8, 0), LayoutError, "got list", "Convert it")
        yield bad(f"{name} layout", lambda c=call: c("zigzag", x, 0), BatchError, "takes a layout", "str")
    other = layouts.contiguous(9, 1)
    yield bad("sequences", lambda: relayout(x, ONE, other, one_rank(), 0), BatchError, "both must be of one sequence")
    leaf = torch.zeros(8, requires_grad=True)
    says = "for evaluation, but this tensor requires gradients", "torch.no_grad()"
    yield bad("gradients", lambda: gather_outputs(leaf, ONE, one_rank(), 0), BatchError, *says)
    for to in (1, -1):
        says = "must be a rank in [0, 1)", f"but got {to}"
        yield bad(f"to {to}", lambda t=to: gather_outputs(x, ONE, one_rank(), 0, to=t), BatchError, *says)
    for value in ([x], None, 3):
        says = "takes a mapping of names to tensors", type(value).__name__
        yield bad(f"same {type(value).__name__}", lambda v=value: check_same(v, one_rank()), BatchError, *says)
    yield bad("same object", lambda: check_same({"x": object()}, one_rank()), BatchError, "x")
    yield bad("same set", lambda: check_same({"x": {1}}, one_rank()), BatchError, "x")


def _meshes():
    def closed():
        if dist.is_initialized():
            dist.destroy_process_group()
        return make_mesh(cp=2)

    yield bad("no group", closed, BatchError, "before torch.distributed.init_process_group", "Call that first")
    for sizes in ({"cp": 2}, {"dp": 0}, {"tp": -1}, {"dp": 3, "cp": 3}):
        says = "is a mesh of", "but there are 1", "whose product is the number of ranks"
        yield bad(f"mesh {sizes}", lambda s=sizes: (one_rank(), make_mesh(**s)), BatchError, *says)
    for sizes in ({"ranks": 2, "dp": 2}, {"ranks": 3, "cp": 2}, {"ranks": 0}):
        says = "`ranks` must be a multiple of cp, without dp", "dp is ranks / cp"
        yield bad(f"mesh {sizes}", lambda s=sizes: (one_rank(), make_mesh(**s)), BatchError, *says)
    for value in (2.5, "2", True):
        says = f"cp = {value!r}", "an integer"
        yield bad(f"cp {value!r}", lambda v=value: (one_rank(), make_mesh(cp=v)), BatchError, *says)
    says = ("device_type must be", "'nowhere'")
    yield bad("device type", lambda: (one_rank(), make_mesh(device_type="nowhere")), BatchError, *says)


def rows():
    yield from _batches()
    yield from _documents()
    yield from _losses()
    yield from _heads()
    yield from _moving()
    yield from _meshes()
