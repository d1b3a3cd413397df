"""Bad calls of causal_conv1d and conv_plan, on one device."""

import numpy as np
import torch

import longspan as ls
from longspan import MaskError, PlanError, layouts, masks
from tests.refusals.bad_inputs import NAN, bad, counts, mesh

X, WEIGHT, BIAS = torch.zeros(2, 8, 4), torch.zeros(4, 3), torch.zeros(4)
SIZES = {"channels": 4, "width": 3, "dtype": "float32"}
NO_SIZES = (0, -1, 2.5, "8", True, NAN, None, [4], (1 << 24) + 1, 10**30)


def conv(x=X, weight=WEIGHT, bias=BIAS, **options):
    return ls.causal_conv1d(x, weight, bias, **options)


def planned(documents=None, layout=None, **change):
    return ls.conv_plan(documents, layouts.zigzag(16, 2) if layout is None else layout, **{**SIZES, **change})


def _tensors():
    shapes = {"x": "(batch, tokens, channels)", "weight": "(channels, width)", "bias": "(channels,)"}
    for name, shape in shapes.items():
        for value in ([1.0], "x", 3, np.zeros(4, dtype=np.float32)):
            says = f"{name} must be a torch.Tensor of shape {shape}", type(value).__name__, "torch.as_tensor"
            yield bad(f"{name} {type(value).__name__}", lambda n=name, v=value: conv(**{n: v}), PlanError, *says)
        for dtype in (torch.int64, torch.bool, torch.complex64):
            made = torch.zeros(1, 1, 4).to(dtype)
            says = f"{name} is of {dtype}", "cast it first"
            yield bad(f"{name} {dtype}", lambda n=name, v=made: conv(**{n: v}), PlanError, *says)
        made = torch.zeros(1, 1, 1, 4)
        says = f"{name} must be {shape}, but has shape (1, 1, 1, 4)"
        yield bad(f"{name} of 4 dims", lambda n=name, v=made: conv(**{n: v}), PlanError, says)
    nested = torch.nested.nested_tensor([torch.zeros(3, 4)], layout=torch.jagged)
    yield bad("nested", lambda: conv(nested), PlanError, "x is nested", "documents=[...]")
    says = "weight must be (channels, width), but has shape (4, 1, 3)", "weight.squeeze(1) of a Conv1d"
    yield bad("weight of a Conv1d", lambda: conv(weight=torch.zeros(4, 1, 3)), PlanError, *says)
    says = "x has 8 channels, but weight of shape (4, 3) is for 4", "transpose it"
    yield bad("channels first", lambda: conv(X.mT), PlanError, *says)
    says = "x has 4 channels, but bias of shape (5,) is for 5"
    yield bad("bias of 5", lambda: conv(bias=torch.zeros(5)), PlanError, says)
    says = "the width of weight must be >= 1", "(4, 0)"
    yield bad("width 0", lambda: conv(weight=torch.zeros(4, 0)), PlanError, *says)
    for name in ("weight", "bias"):
        made = {"weight": WEIGHT, "bias": BIAS}[name].double()
        says = f"{name} must have the dtype of x, torch.float32", "torch.autocast"
        yield bad(f"{name} of another dtype", lambda n=name, v=made: conv(**{n: v}), PlanError, *says)
        made = made.float().to("meta")
        says = f"x is on cpu, but {name} is on meta", "Move it there"
        yield bad(f"{name} elsewhere", lambda n=name, v=made: conv(**{n: v}), PlanError, *says)


def _options():
    for value in ("relu", 3, "SiLU", [None]):
        says = "activation must be None, 'silu' or 'swish'", f"but got {value!r}"
        yield bad(f"activation {value!r}", lambda v=value: conv(activation=v), PlanError, *says)
    yield bad("name", lambda: conv(name=3), PlanError, "name must be a str", "but got 3")
    says = "document lengths add up to 7, but the sequence has 8 tokens", "one more document"
    yield bad("too few tokens", lambda: conv(documents=[3, 4]), PlanError, *says)
    says = "documents must be", "got 3 lists for 2 batch rows"
    yield bad("three rows", lambda: conv(documents=[[8]] * 3), PlanError, *says)
    yield bad("negative", lambda: conv(documents=[9, -1]), MaskError, "document 1 has length -1")
    yield bad("a text", lambda: conv(documents="8"), PlanError, "documents = '8'", "a list of lengths")
    function = masks.from_mask_mod(lambda b, h, q, k: q >= k, 8)
    yield bad("a function", lambda: conv(documents=function), PlanError, "a function decides", "lengths")
    yield bad("group alone", lambda: conv(group=mesh("cp")), PlanError, "a group was given without a plan", "conv_plan")
    plan = planned(layout=layouts.contiguous(8, 1), batch=2)
    says = "group is a mesh of 2 axes ('dp', 'cp')", "mesh['cp']"
    yield bad("two axes", lambda: conv(plan=plan, group=mesh("dp", "cp")), PlanError, *says)
    yield bad("both", lambda: conv(plan=plan, documents=[8]), PlanError, "documents and a plan", "Leave one")
    says = "but got str", "Make one: longspan.conv_plan("
    yield bad("plan of another kind", lambda: conv(plan="exchange"), PlanError, *says)
    says = "the plan is for 2 ranks", "needs group="
    yield bad("no group", lambda: conv(plan=planned(batch=2)), PlanError, *says)
    says = "x has shape (1, 8, 4)", "(batch, tokens, channels) = (2, 8, 4)", "dim=1"
    yield bad("batch", lambda: conv(X[:1], plan=plan), PlanError, *says)


def _plans():
    for word in ("channels", "width", "batch"):
        yield from counts("conv_plan", lambda n, w=word: planned(**{w: n}), PlanError, word, NO_SIZES)
    for dtype in ("float8", torch.int64, None):
        says = "dtype must be one of float64", repr(dtype)
        yield bad(f"dtype {dtype!r}", lambda d=dtype: planned(dtype=d), PlanError, *says)
    for value in (None, 16, masks.causal()):
        says = f"takes a layout, but {type(value).__name__} was given", "longspan.layouts"
        call = lambda v=value: ls.conv_plan(None, v, **SIZES)  # noqa: E731
        yield bad(f"layout {type(value).__name__}", call, PlanError, *says)
    says = "documents are given for 3 batch rows, but the plan is for 2", "or one per row"
    yield bad("rows", lambda: planned([[16]] * 3, batch=2), PlanError, *says)
    says = "document lengths add up to 15, but the sequence has 16 tokens"
    yield bad("lengths", lambda: planned([15]), PlanError, says)


def rows():
    yield from _tensors()
    yield from _options()
    yield from _plans()
