"""Bad calls of attention, flex_attention and block_mask, on one device."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import longspan as ls
from longspan import KernelError, LayoutError, MaskError, PlanError, ScheduleError, layouts, masks
from longspan.scores import RelativeBias, alibi_slopes
from tests.refusals.bad_inputs import INF, NAN, bad, counts

Q, K, V = torch.zeros(3, 1, 2, 8, 16).unbind(0)
CAUSAL = masks.causal()


def zeros(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


def call(**kwargs):
    return ls.attention(Q, K, V, CAUSAL, **kwargs)


def flex(*args, q=Q, k=K, v=V, **kwargs):
    return ls.flex_attention(q, k, v, *args, **kwargs)


def _tensors():
    for place, name in enumerate("qkv"):
        for value in ([1.0], None, "q", 3, np.zeros((1, 2, 8, 16), dtype=np.float32)):
            tensors = [Q, K, V]
            tensors[place] = value
            says = f"{name} must be a torch.Tensor", type(value).__name__, "torch.as_tensor"
            kind = f"{name} {type(value).__name__}"
            yield bad(f"attention {kind}", lambda t=tensors: ls.attention(*t, CAUSAL), PlanError, *says)
            yield bad(f"flex {kind}", lambda t=tensors: ls.flex_attention(*t), PlanError, *says)
    for dtype in (
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        tensors = [zeros(1, 2, 8, 16).to(dtype)] * 3
        says = f"q has dtype {dtype}", "torch.bfloat16", "Cast it first"
        yield bad(f"attention {dtype}", lambda t=tensors: ls.attention(*t, CAUSAL), PlanError, *says)
        yield bad(f"flex {dtype}", lambda t=tensors: ls.flex_attention(*t), PlanError, *says)
    yield bad("sparse", lambda: ls.attention(Q.to_sparse(), K, V, CAUSAL), PlanError, "q is a tensor of kind", "sparse")
    nested = torch.nested.as_nested_tensor([zeros(2, 8, 16)], layout=torch.jagged)
    says = "q is a tensor of kind nested", "masks.documents(lengths)"
    yield bad("nested", lambda: ls.attention(nested, K, V, CAUSAL), PlanError, *says)
    for name, shape in {"k": (1, 2, 9, 16), "v": (1, 2, 7, 16)}.items():
        tensors = {"k": K, "v": V, name: zeros(shape)}
        says = "q has 8 tokens", f"{name} {shape[2]}", "over one sequence", "longspan.flex_attention"
        yield bad(f"long {name}", lambda t=tensors: ls.attention(Q, t["k"], t["v"], CAUSAL), PlanError, *says)
    for name, q, k, v, error, *says in (
        ("3 dims", zeros(2, 8, 16), K, V, PlanError, "q must have 4 dims", "(2, 8, 16)"),
        ("5 dims", zeros(1, 1, 2, 8, 16), K, V, PlanError, "q must have 4 dims", "(1, 1, 2, 8, 16)"),
        ("k of 2 dims", Q, zeros(8, 16), V, PlanError, "k must have 4 dims", "(8, 16)"),
        ("no dims", zeros(()), K, V, PlanError, "q must have 4 dims", "()"),
        ("features", Q, zeros(1, 2, 8, 15), V, PlanError, "k has shape (1, 2, 8, 15)", "(1, 2, 8, 16)"),
        ("batch", Q, zeros(2, 2, 8, 16), V, PlanError, "k has shape (2, 2, 8, 16)", "(1, 2, 8, 16)"),
        ("heads", zeros(1, 3, 8, 16), K, V, ScheduleError, "q_heads = 3", "leaves 1 over", "multiple of"),
        ("v heads", Q, K, zeros(1, 1, 8, 16), PlanError, "v has shape (1, 1, 8, 16)", "(1, 2, 8, 16)"),
        ("no batch", *[zeros(0, 2, 8, 16)] * 3, ScheduleError, "batch = 0", "at least 1"),
        ("no heads", *[zeros(1, 0, 8, 16)] * 3, ScheduleError, "q_heads = 0", "at least 1"),
        ("no features", *[zeros(1, 2, 8, 0)] * 3, ScheduleError, "head_dim = 0", "at least 1"),
        ("k dtype", Q, K.double(), V, PlanError, "q is torch.float32", "k is torch.float64", "must agree"),
        ("v dtype", Q, K, V.bfloat16(), PlanError, "q is torch.float32", "v is torch.bfloat16", "must agree"),
        ("k device", Q, zeros(1, 2, 8, 16, device="meta"), V, PlanError, "k is torch.float32 on meta", "must agree"),
    ):
        yield bad(name, lambda q=q, k=k, v=v: ls.attention(q, k, v, CAUSAL), error, *says)
    says = "is for 9 tokens", "seq_len = 8", "Build the mask for the length"
    yield bad("mask length", lambda: ls.attention(Q, K, V, masks.causal(9)), MaskError, *says)
    three = masks.per_head(*[CAUSAL] * 3)
    yield bad("mask heads", lambda: ls.attention(Q, K, V, three), PlanError, "differs over 3 heads", "2")


def _arguments():
    for value in (NAN, INF, -INF, "a", [1], True, 1j, zeros(2), torch.ones(1, dtype=torch.complex64)):
        says = "scale = ", "one finite number"
        yield bad(f"scale {value!r}", lambda v=value: call(scale=v), PlanError, *says)
        yield bad(f"flex scale {value!r}", lambda v=value: flex(scale=v), PlanError, *says)
    learned = torch.ones((), requires_grad=True)
    yield bad("learned scale", lambda: call(scale=learned), PlanError, "scale is a tensor that needs a gradient")
    for value in (None, [], 3, b"auto"):
        says = f"kernel = {value!r}", "goes by its name"
        yield bad(f"kernel {value!r}", lambda v=value: call(kernel=v), KernelError, *says)
    yield bad("call name", lambda: call(name=3), PlanError, "name = 3", "a str")
    for value in ("fast", "", "Auto", "cpu_flash "):
        says = "kernel must be one of sdpa, auto", f"but got {value!r}"
        yield bad(f"kernel {value!r}", lambda v=value: call(kernel=v), KernelError, *says)
    for value in ("flash", "cudnn", "efficient", "varlen"):
        says = f"kernel '{value}' cannot run: it runs on GPUs", "on cpu. Use 'cpu_flash' or 'reference'"
        yield bad(f"kernel {value}", lambda v=value: call(kernel=v), KernelError, *says)
    for value in ("mean", None, True, []):
        says = f"captured_grads = {value!r}", "'sum' adds", "'share' leaves"
        yield bad(f"captured_grads {value!r}", lambda v=value: call(captured_grads=v), PlanError, *says)
    for name, value in {
        "text": "causal",
        "function": lambda b, h, q, kv: q >= kv,
        "not called": masks.causal,
        "layout": layouts.zigzag(8, 2),
    }.items():
        says = "plan_or_mask must be", type(value).__name__
        yield bad(f"what {name}", lambda v=value: ls.attention(Q, K, V, v), PlanError, *says)
    nans = torch.full((8, 8), NAN)
    yield bad("what nan mask", lambda: ls.attention(Q, K, V, nans), MaskError, "a dense mask must be True", "float32")


def _extras():
    for value in (0, -1, NAN, INF, "a", True, torch.tensor(3.0)):
        yield bad(f"softcap {value!r}", lambda v=value: call(softcap=v), KernelError, f"softcap = {value!r}", "above 0")
    for word in ("sinks", "alibi"):
        for value in (0.5, "a", [0.1, 0.2], np.zeros(2), zeros(2, dtype=torch.int64)):
            kind = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            says = f"{word} must be a floating-point tensor (heads), but got {kind}", "Convert it first"
            yield bad(f"{word} {kind}", lambda w=word, v=value: call(**{w: v}), KernelError, *says)
        for shape in ((3,), (2, 1), (), (1,)):
            says = f"{word} has shape {shape}, but (heads = 2) is needed", "all query heads"
            yield bad(f"{word} {shape}", lambda w=word, s=shape: call(**{w: zeros(s)}), KernelError, *says)
    meta = zeros(2, device="meta")
    yield bad("sinks on meta", lambda: call(sinks=meta), KernelError, "sinks are on meta, but q is on cpu")
    yield bad("alibi on meta", lambda: call(alibi=meta), KernelError, "alibi is on meta, but q is on cpu")
    wide = zeros(1, 1, 8, 8, device="meta")
    yield bad("bias on meta", lambda: call(bias=wide), KernelError, "bias is on meta, but q is on cpu")
    for value in (0.5, "t5", zeros(8, 2)):
        says = "relative_bias takes longspan.scores.RelativeBias", type(value).__name__
        yield bad(f"relative_bias {type(value).__name__}", lambda v=value: call(relative_bias=v), KernelError, *says)
    for name, arguments, *says in (
        ("heads", (zeros(8, 3),), "RelativeBias.table has shape (8, 3)", "heads = 2"),
        ("no dims", (zeros(()),), "takes a table (buckets, heads)", "()"),
        ("one dim", (zeros(8),), "takes a table (buckets, heads)", "(8,)"),
        ("a list", ([1.0],), "takes a table (buckets, heads)", "list"),
        ("two buckets", (zeros(2, 2),), "shape (2, 2)", "2 buckets or more"),
        ("one bucket", (zeros(1, 2), False), "shape (1, 2)", "2 buckets or more"),
        ("near", (zeros(8, 2), False, 2), "max_distance=2", "more than half"),
        ("nan", (zeros(8, 2), True, NAN), "max_distance = nan", "an integer"),
        ("float", (zeros(8, 2), True, 2.5), "max_distance = 2.5", "an integer"),
        ("integers", (zeros(8, 2, dtype=torch.int64),), "must be a floating-point tensor", "torch.int64"),
        ("meta", (zeros(8, 2, device="meta"),), "RelativeBias.table is on meta", "q is on cpu"),
    ):
        yield bad(f"table {name}", lambda a=arguments: call(relative_bias=RelativeBias(*a)), KernelError, *says)
    yield from counts("alibi_slopes", alibi_slopes, KernelError, "num_heads", (0, -1, 2.5, "8", True, 1 << 20))
    for shape in ((8, 8), (1, 1, 8, 7), (1, 3, 8, 8), (2, 1, 8, 8), (1, 1, 9, 9), ()):
        says = f"bias has shape {shape}", "(1, 2, 8, 8)", "the whole bias on every rank"
        yield bad(f"bias {shape}", lambda s=shape: call(bias=zeros(s)), KernelError, *says)
    for value in (
        zeros(1, 1, 8, 8, dtype=torch.bool),
        zeros(1, 1, 8, 8, dtype=torch.int64),
        [0.0],
        np.zeros((8, 8)),
        1.0,
    ):
        kind = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        says = "bias must be a floating-point tensor", f"but got {kind}", "To hide pairs use a mask"
        yield bad(f"bias {kind}", lambda v=value: call(bias=v), KernelError, *says)
    for value in (-0.1, 1.0, 2, NAN, INF, "a", True, [0.1]):
        says = f"dropout = {value}", "a probability, 0 or more and below 1"
        yield bad(f"dropout {value!r}", lambda v=value: call(dropout=v, seed=1), KernelError, *says)
    yield bad("no seed", lambda: call(dropout=0.5), KernelError, "needs a seed", "pass seed=")
    for value in (-1, 1 << 63, 2.5, "a", True, torch.tensor(3), [1]):
        says = f"seed = {value!r}", "a whole number from 0 to 2**63 - 1"
        yield bad(f"seed {value!r}", lambda v=value: call(dropout=0.5, seed=v), KernelError, *says)
    yield bad("seed for nothing", lambda: call(seed="x"), KernelError, "seed = 'x'", "a whole number")


SCORES = {
    "None": (lambda s, b, h, q, kv: None, "NoneType"),
    "a number": (lambda s, b, h, q, kv: 1.0, "float"),
    "integers": (lambda s, b, h, q, kv: q - kv, "torch.int64 of shape"),
    "booleans": (lambda s, b, h, q, kv: q > kv, "torch.bool of shape"),
    "complex": (lambda s, b, h, q, kv: s * 1j, "torch.complex64 of shape"),
    "a tuple": (lambda s, b, h, q, kv: (s, s), "tuple"),
    "a dict": (lambda s, b, h, q, kv: {}, "dict"),
    "a text": (lambda s, b, h, q, kv: "x", "str"),
    "numpy": (lambda s, b, h, q, kv: np.zeros(1), "ndarray"),
    "another shape": (lambda s, b, h, q, kv: torch.zeros(3, 7), "torch.float32 of shape (3, 7)"),
}


def _functions():
    for name, (function, found) in SCORES.items():
        says = f"returned {found}", "a floating-point tensor with one score for a pair"
        yield bad(f"score {name}", lambda f=function: call(score_mod=f), KernelError, *says)
        yield bad(f"flex score {name}", lambda f=function: flex(f), KernelError, *says)
    for value in (3, "softcap", [], zeros(1)):
        says = "score_mod must be a function (score, b, h, q_idx, kv_idx) -> score", type(value).__name__
        yield bad(f"score_mod {type(value).__name__}", lambda v=value: call(score_mod=v), KernelError, *says)
    for name, function in {"two": lambda s, b: s, "none": lambda: 0, "six": lambda s, b, h, q, kv, x: s}.items():
        says = "score_mod is called as score_mod(score, b, h, q_idx, kv_idx)", "Give it these 5 arguments"
        yield bad(f"score_mod of {name} arguments", lambda f=function: call(score_mod=f), KernelError, *says)
    for name, mod, found in (
        ("None", lambda b, h, q, kv: None, "NoneType"),
        ("floats", lambda b, h, q, kv: (q - kv).float(), "float32"),
        ("a tuple", lambda b, h, q, kv: (q > kv,), "tuple"),
    ):
        says = "mask_mod must return one boolean tensor for a pair", found
        mask = lambda m=mod: ls.attention(Q, K, V, masks.from_mask_mod(m, 8))  # noqa: E731
        yield bad(f"a mask function in a call returns {name}", mask, MaskError, *says)


def _flex():
    made = ls.plan(CAUSAL, layouts.contiguous(8, 1), q_heads=2, kv_heads=2, head_dim=16, dtype="float32")
    many = ls.plan(CAUSAL, layouts.contiguous(8, 2), q_heads=2, kv_heads=2, head_dim=16, dtype="float32")
    seen = lambda b, h, q, kv: q >= kv  # noqa: E731
    long = create_block_mask(seen, None, None, 16, 16, device="cpu")
    heads = create_block_mask(seen, None, 3, 8, 8, device="cpu")
    batch = create_block_mask(seen, 3, None, 8, 8, device="cpu")
    for name, run, error, *says in (
        ("heads", lambda: flex(q=zeros(1, 4, 8, 16)), PlanError, "query has 4 heads and key 2", "enable_gqa=True"),
        ("dims", lambda: flex(q=zeros(4, 8, 16)), PlanError, "have 4 dims", "(4, 8, 16)"),
        ("batch", lambda: flex(q=zeros(3, 2, 8, 16), k=zeros(2, 2, 8, 16)), PlanError, "3 batch rows and key 2"),
        ("lse twice", lambda: flex(return_lse=True, return_aux=AuxRequest(lse=True)), PlanError, "both given"),
        ("aux", lambda: flex(return_aux=True), PlanError, "return_aux = True", "AuxRequest"),
        ("aux dict", lambda: flex(return_aux={"lse": True}), PlanError, "return_aux = {'lse': True}", "AuxRequest"),
        ("options", lambda: flex(kernel_options={"BLOCK_M": 3}), KernelError, "'BLOCK_M': 3", "Leave them out"),
        ("function", lambda: flex(None, seen), PlanError, "a BlockMask of PyTorch", "function", "from_mask_mod"),
        ("tensor", lambda: flex(None, torch.ones(8, 8)), PlanError, "a BlockMask of PyTorch", "Tensor"),
        ("text", lambda: flex(None, "causal"), PlanError, "a BlockMask of PyTorch", "str"),
        ("block mask length", lambda: flex(None, long), PlanError, "for 16 queries and 16 keys", "8 and 8"),
        ("block mask heads", lambda: flex(None, heads), MaskError, "has 3 heads, but the tensors have 2"),
        ("block mask batch", lambda: flex(None, batch), MaskError, "has 3 batch rows, but the tensors have 1"),
        ("mask length", lambda: flex(None, masks.causal(9)), MaskError, "is for 9 tokens", "seq_len = 8"),
        ("another mask", lambda: flex(None, masks.full(8), plan=made), PlanError, "both given", "leave block_mask out"),
        ("no plan", lambda: flex(plan=3), PlanError, "plan = 3 was given", "longspan.plan"),
        ("mask as plan", lambda: flex(plan=CAUSAL), PlanError, "plan = <mask causal()>", "longspan.plan"),
        ("no group", lambda: flex(plan=many), PlanError, "the plan is for 2 ranks", "needs group="),
        ("group alone", lambda: flex(group=3), PlanError, "a group was given with a mask", "Make a plan first"),
        (
            "maxima",
            lambda: flex(plan=made, return_aux=AuxRequest(max_scores=True)),
            PlanError,
            "max_scores under a plan",
        ),
        ("captured", lambda: flex(captured_grads="all"), PlanError, "captured_grads = 'all'"),
    ):
        yield bad(f"flex {name}", run, error, *says)


def _plans():
    made = ls.plan(CAUSAL, layouts.contiguous(8, 1), q_heads=2, kv_heads=2, head_dim=16, dtype="float32")
    many = ls.plan(CAUSAL, layouts.contiguous(16, 2), q_heads=2, kv_heads=2, head_dim=16, dtype="float32")
    for value in (None, 3, "world", object, [0, 1]):
        says = "the plan is for 2 ranks, so it needs group=", type(value).__name__
        yield bad(
            f"group {type(value).__name__}", lambda v=value: ls.attention(Q, K, V, many, group=v), PlanError, *says
        )
    yield bad(
        "group and mask", lambda: call(group=object()), PlanError, "a group was given with a mask", "longspan.plan"
    )
    for name, q, k, v, *says in (
        ("tokens", zeros(1, 2, 9, 16), K, V, "q has shape (1, 2, 9, 16)", "(1, 2, 8, 16)", "layout.shard"),
        ("heads", zeros(1, 4, 8, 16), K, V, "q has shape (1, 4, 8, 16)", "(1, 2, 8, 16)"),
        ("batch", *[zeros(2, 2, 8, 16)] * 3, "q has shape (2, 2, 8, 16)", "plan for these shapes"),
        ("values", Q, K, zeros(1, 2, 8, 8), "v has shape (1, 2, 8, 8)", "plan for these shapes"),
        ("dtype", Q.double(), K.double(), V.double(), "dtype torch.float64", "the plan is for float32"),
        ("key dtype", Q, K.double(), V, "k is torch.float64", "must agree"),
    ):
        yield bad(f"plan of other {name}", lambda q=q, k=k, v=v: ls.attention(q, k, v, made), PlanError, *says)


def _block_masks():
    layout = layouts.zigzag(8, 2)
    block_mask = ls.block_mask
    for value in (3, None, "causal", lambda b, h, q, kv: True):
        says = "takes a mask and a layout", type(value).__name__
        yield bad(f"mask {type(value).__name__}", lambda v=value: block_mask(v, layout, 0), MaskError, *says)
        yield bad(f"layout {type(value).__name__}", lambda v=value: block_mask(CAUSAL, v, 0), MaskError, *says)
    for rank in (2, -1):
        yield bad(f"rank {rank}", lambda r=rank: block_mask(CAUSAL, layout, r), LayoutError, f"but got {rank}")
    for rank in ("a", 0.5, None):
        yield bad(f"rank {rank!r}", lambda r=rank: block_mask(CAUSAL, layout, r), LayoutError, f"rank = {rank!r}")
    says = "9 tokens", "for 8. Build both for the same sequence"
    yield bad("block mask length", lambda: block_mask(masks.causal(9), layout, 0), MaskError, *says)
    for value in ("x", None, 0):
        says = f"kv must be {value!r}", "'global' or 'local'"
        yield bad(f"kv {value!r}", lambda v=value: block_mask(CAUSAL, layout, 0, kv=v), MaskError, *says)
    values = (0, -1, 2.5, "a", True, NAN)
    sized = lambda n: block_mask(CAUSAL, layout, 0, block_size=n)  # noqa: E731
    yield from counts("block_mask", sized, MaskError, "block_size", values)
    for value in ("nowhere", 2.5, None):
        says = f"device must be {value!r}", "torch"
        yield bad(f"device {value!r}", lambda v=value: block_mask(CAUSAL, layout, 0, device=v), MaskError, *says)


def rows():
    yield from _tensors()
    yield from _arguments()
    yield from _extras()
    yield from _functions()
    yield from _flex()
    yield from _plans()
    yield from _block_masks()
