"""Bad plans: sizes, schedules, machines, and questions to a plan."""

import torch

from longspan import LayoutError, MaskError, PlanError, ScheduleError, layouts, masks, plan
from longspan.planning import Link, Machine, Sizes, Tiling, machine_named
from longspan.planning.machine import CPU
from tests.refusals.bad_inputs import INF, NAN, bad, counts

GOOD = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
NO_SIZES = (0, -1, 2.5, "8", True, NAN, None, [4], (1 << 24) + 1, 10**30)


def planned(mask=None, layout=None, **change):
    mask = masks.causal() if mask is None else mask
    return plan(mask, layouts.zigzag(16, 4) if layout is None else layout, **{**GOOD, **change})


def machine(**change):
    fields = {name: getattr(CPU, name) for name in Machine.__slots__}
    return Machine(**{**fields, **change})


def _arguments():
    for word in ("q_heads", "kv_heads", "head_dim", "v_head_dim", "batch"):
        values = [value for value in NO_SIZES if not (word == "v_head_dim" and value is None)]
        yield from counts("plan", lambda n, w=word: planned(**{w: n}), ScheduleError, word, values)
    yield from counts("Sizes", lambda n: Sizes(4, 2, 8, 8, n), ScheduleError, "itemsize", NO_SIZES)
    yield bad("heads", lambda: planned(kv_heads=3), ScheduleError, "q_heads = 4", "leaves 1 over", "multiple of")
    for dtype in ("float8", torch.int64, "int8", None, 4, torch.complex64, "FLOAT32"):
        says = "dtype must be one of float64, float32, bfloat16, float16", repr(dtype)
        yield bad(f"dtype {dtype!r}", lambda d=dtype: planned(dtype=d), PlanError, *says)
    for name in (
        "rings",
        "",
        "hybrid",
        "hybrid()",
        "hybrid(2,nothing)",
        "hybrid(-1)",
        "auto2",
        "hybrid(9999999)",
        "__class__",
    ):
        says = "scheme must be one of", f"but got {name!r}", "hybrid(HEADS, PLANNER)"
        yield bad(f"scheme {name!r}", lambda n=name: planned(scheme=n), PlanError, *says)
    for value in (None, 3, ["ring"], b"ring"):
        says = f"scheme = {value!r}", "A scheme is a name"
        yield bad(f"scheme {value!r}", lambda v=value: planned(scheme=v), PlanError, *says)
    for heads in (0, 3, 5, 64):
        says = f"groups of {heads} ranks", "Use a divisor of 4"
        yield bad(f"hybrid {heads}", lambda h=heads: planned(scheme=f"hybrid({h},ring)"), PlanError, *says)
    yield bad("machine", lambda: planned(machine="dgx"), PlanError, "machine must be a Machine", "h100", "got 'dgx'")
    yield bad(
        "machine_named", lambda: machine_named("dgx"), PlanError, "machine must be a Machine", "h100", "got 'dgx'"
    )
    for value in (3, ["h100"], {"flops": 1}):
        yield bad(f"machine {value!r}", lambda v=value: planned(machine=v), PlanError, f"machine = {value!r}", "a name")
    for value in (None, 1, "yes"):
        yield bad(f"keep {value!r}", lambda v=value: planned(keep=v), PlanError, f"keep = {value!r}", "bool")
    values = (-1, 2.5, "1MB", True, NAN, 10**30)
    yield from counts("plan", lambda n: planned(fetch_bytes=n), PlanError, "fetch_bytes", values)
    yield bad("fetch_bytes", lambda: planned(fetch_bytes=100), PlanError, "fetch_bytes = 100", "Give at least")


def _what():
    layout = layouts.zigzag(16, 4)
    for value in (None, 3, "causal", torch.ones(16), masks.causal):
        says = "takes a mask and a layout", type(value).__name__
        yield bad(f"mask {type(value).__name__}", lambda v=value: plan(v, layout, **GOOD), PlanError, *says)
        yield bad(f"layout {type(value).__name__}", lambda v=value: plan(masks.causal(), v, **GOOD), PlanError, *says)
    yield bad("lengths", lambda: planned(masks.causal(15)), MaskError, "is for 15 tokens", "seq_len = 16")
    three = masks.per_head(*[masks.causal(16)] * 3)
    yield bad("mask heads", lambda: planned(three), PlanError, "differs over 3 heads", "the plan is for 4")
    rows = masks.per_row(masks.causal(16), masks.full(16))
    yield bad("mask rows", lambda: planned(rows, batch=3), PlanError, "differs over 2 batch rows", "the plan is for 3")
    made = planned(scheme="ring")
    for direction in ("sideways", None, 1):
        says = "'forward' or 'backward'", f"{direction!r}"
        yield bad(f"direction {direction!r}", lambda d=direction: made.steps(0, d), PlanError, *says)
    for rank in (4, -1):
        yield bad(f"rank {rank}", lambda r=rank: made.steps(r), PlanError, f"no rank {rank}")
    yield bad(
        "equal tokens", lambda: layouts.zigzag(8, 2).positions(5), LayoutError, "rank must be in [0, 2), but got 5"
    )


def _machines():
    for word in ("flops", "forward_share", "backward_share", "copy_bandwidth"):
        for value in (0, -1.0, NAN, INF, "fast", None, True):
            says = "machine 'cpu'", f"got {word} = {value!r}", "a finite number above 0"
            yield bad(f"{word} {value!r}", lambda w=word, v=value: machine(**{w: v}), PlanError, *says)
    for word in ("slot_seconds", "op_seconds", "launch_seconds", "message_seconds", "call_seconds"):
        for value in (-1.0, NAN, INF, "slow"):
            says = "machine 'cpu'", f"got {word} = {value!r}", "a finite number of at least 0"
            yield bad(f"{word} {value!r}", lambda w=word, v=value: machine(**{w: v}), PlanError, *says)
    yield from counts("machine", lambda n: machine(slots=n), PlanError, "slots", (0, -1, 2.5, "8"))
    for value in (0, -1.0, NAN, INF, "fast"):
        says = "Link()", f"got bandwidth = {value!r}", "a finite number above 0"
        yield bad(f"bandwidth {value!r}", lambda v=value: Link(8, v, 1e-6), PlanError, *says)
    for value in (-1e-6, NAN, INF, None):
        says = "Link()", f"got latency = {value!r}", "a finite number of at least 0"
        yield bad(f"latency {value!r}", lambda v=value: Link(8, 1e9, v), PlanError, *says)
    yield from counts("Link", lambda n: Link(n, 1e9, 0.0), PlanError, "ranks", (0, -1, 2.5, "8"))
    yield from counts("Tiling", lambda n: Tiling(n, 1, 1), PlanError, "rows", (0, -8, 0.5))
    yield from counts("Tiling", lambda n: Tiling(1, 1, 1, far_rows=n), PlanError, "far_rows", (-8, 0.5))
    for value in (0, -1.0, NAN, INF, "fast"):
        says = "Tiling()", f"got far_share = {value!r}", "a finite number above 0"
        yield bad(f"far_share {value!r}", lambda v=value: Tiling(1, 1, 1, far_share=v), PlanError, *says)
    yield bad("no links", lambda: machine(links=()), PlanError, "links over []", "one or more")
    wrong = (Link(8, 1e9, 0.0), Link(4, 1e9, 0.0))
    yield bad(
        "links outside in", lambda: machine(links=wrong), PlanError, "links over [8, 4]", "from the innermost outwards"
    )
    yield bad("links of tuples", lambda: machine(links=((8, 1e9, 0.0),)), PlanError, "links must be of type Link")
    yield bad("a list of links", lambda: machine(links=list(wrong)), PlanError, "links = [Link(", "must be a tuple")
    yield bad("tiling", lambda: machine(forward_tiling=(1, 2, 3)), PlanError, "forward_tiling = (1, 2, 3)", "Tiling")


def rows():
    yield from _arguments()
    yield from _what()
    yield from _machines()
