"""`flex_attention` against a dense float64 oracle, PyTorch's eager operator, and a plan on two ranks."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan import layouts, masks
from longspan.errors import KernelError, MaskError, PlanError, ScheduleError
from longspan.run.flex import mask_of_block_mask
from longspan.scoring.biases import Extras
from longspan.testing import run_loopback
from tests.flex_families import F64, FAMILIES, Case, alibi, build_case, causal, dense, near_past

NAMES = [(group, name) for group, cases in FAMILIES.items() for name in cases]
SCHEMES = ("ring", "all_gather", "exchange", "all_to_all")
SHARED = "mask_mod uses b"
"""`and_masks` and `or_masks` call `b.new_ones`: with one plane for all batch rows they may be refused."""
LIMIT = 1e-11
"""Relative to the largest number: roundings of 1e-16, times scores of up to 1e3, times sums of up to 2e3 pairs."""


def close(actual, expected, what):
    assert actual.shape == expected.shape, what
    assert torch.equal(actual.isneginf(), expected.isneginf()), what
    wide = {torch.float32: 1e-6, torch.bfloat16: 1e-2}.get(actual.dtype, LIMIT)
    error = (actual.double() - expected.double()).masked_fill(expected.isneginf(), 0.0).abs().max()
    assert error <= wide * max(expected.masked_fill(expected.isneginf(), 0.0).abs().max().item(), 1.0), (
        f"{what}: {error}"
    )


@contextmanager
def computed(name):
    """Expect a case to be computed; combined masks of one plane may be refused."""
    try:
        yield
    except MaskError as error:
        if "_masks, all rows and heads share" in name and SHARED in str(error):
            pytest.xfail(SHARED)
        raise


def zeros_for_none(gradients, leaves):
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True)]


class Answer:
    """The oracle's results for a case."""

    def __init__(self, case, seed):
        self.case = case
        self.q, self.k, self.v, self.dout, self.dlse = case.inputs(seed)
        self.leaves = [t.requires_grad_() for t in (self.q, self.k, self.v)] + list(case.learned)
        self.score = case.score if case.takes is None else case.takes(self.q, self.k, self.v)
        self.out, self.lse, self.top = dense(case, self.q, self.k, self.v, self.score)
        self.dlse = self.dlse.masked_fill(self.lse.isneginf(), 0.0)

    def gradients(self, out, lse=None, wrt=None):
        """Return the gradients of all leaves, of `out` and, if given, of `lse`."""
        seen = ~self.lse.isneginf()
        outputs, given = [out], [self.dout]
        if lse is not None:
            outputs, given = [out, lse[seen]], [self.dout, self.dlse[seen]]
        pairs = [(o, g) for o, g in zip(outputs, given, strict=True) if o.requires_grad]
        leaves = self.leaves if wrt is None else wrt
        outputs, given = zip(*pairs, strict=True)
        actual = torch.autograd.grad(outputs, leaves, given, allow_unused=True, retain_graph=True)
        return zeros_for_none(actual, leaves)


@pytest.mark.parametrize(("group", "name"), NAMES, ids=[f"{group}: {name}" for group, name in NAMES])
def test_one_device(group, name):
    case = build_case(group, name)
    right = Answer(case, len(name))
    block = case.block_mask()
    arguments = right.q, right.k, right.v, right.score, block, case.scale, case.groups != case.heads
    with computed(name):
        out, lse = ls.flex_attention(*arguments, return_lse=True)
    close(out, right.out, "out")
    close(lse, right.lse, "lse")
    for i, (a, b) in enumerate(zip(right.gradients(out, lse), right.gradients(right.out, right.lse), strict=True)):
        close(a, b, f"gradient {i}")
    with torch.no_grad():
        again, aux = ls.flex_attention(*arguments, return_aux=AuxRequest(max_scores=True))
    assert torch.equal(again, out)
    close(aux.max_scores, right.top, "max_scores")


PLANNED = [(group, name) for group, name in NAMES if build_case(group, name).fits_plan]


@pytest.mark.share(4)
@pytest.mark.parametrize("number", range(len(PLANNED)), ids=[f"{group}: {name}" for group, name in PLANNED])
def test_two_ranks(number):
    group, name = PLANNED[number]
    case = build_case(group, name)
    right = Answer(case, number)
    block = case.block_mask()
    mask = masks.full(case.keys) if block is None else mask_of_block_mask(block, batch=case.batch, heads=case.heads)
    kinds = (layouts.contiguous, layouts.zigzag, layouts.striped)
    layout = kinds[number % (3 if case.keys < 63 else 2)](case.keys, 2)  # stripes of one token: a tile for every pair
    sizes = {"q_heads": case.heads, "kv_heads": case.groups, "head_dim": case.dim, "v_head_dim": case.v_dim}
    extras = None if right.score is None else Extras(right.score)
    with computed(name):
        plan = ls.plan(mask, layout, batch=case.batch, dtype=F64, scheme=SCHEMES[number % 4], **sizes)
        actual = run_loopback(plan, right.q, right.k, right.v, right.dout, scale=case.scale, extras=extras)
    inner = () if extras is None else extras.scoring(right.q, plan).captured
    close(actual[0], right.out, "out")
    close(actual[1], right.lse, "lse")
    gradients = [*actual[2:5], *map(torch.zeros_like, case.learned)]
    if inner:  # from captured tensors to what they were computed from
        through = torch.autograd.grad(inner, right.leaves, actual[5:], allow_unused=True, retain_graph=True)
        gradients = [a + b for a, b in zip(gradients, zeros_for_none(through, right.leaves), strict=True)]
    for i, (a, b) in enumerate(zip(gradients, right.gradients(right.out), strict=True)):
        close(a, b, f"gradient {i}")


IN_EAGER = [(group, name) for group, name in NAMES if build_case(group, name).in_eager]


@pytest.mark.share(25)
@pytest.mark.filterwarnings("ignore")  # of its compiler
@pytest.mark.parametrize(("group", "name"), IN_EAGER, ids=[f"{group}: {name}" for group, name in IN_EAGER])
def test_pytorch_eager(group, name):
    """The same call of PyTorch's operator, which has no backward on CPUs."""
    torch.compiler.reset()  # code of another case counts towards the limit of recompilations
    case = build_case(group, name)
    right = Answer(case, len(name))
    arguments = right.score, case.block_mask(), case.scale, case.groups != case.heads
    with torch.no_grad():
        out, lse = torch_flex(*(t.detach() for t in (right.q, right.k, right.v)), *arguments, return_lse=True)
    close(out, right.out, "out")
    close(lse, right.lse, "lse")


def test_the_page_lists_the_families():
    page = (Path(__file__).parents[2] / "docs/flex_semantics.md").read_text()
    for group, cases in FAMILIES.items():
        counts = len(cases), *(sum(part == group for part, _ in names) for names in (PLANNED, IN_EAGER))
        assert f"| {group} | {' | '.join(map(str, counts))} |" in page


# -- dtypes, layouts in memory -----------------------------------------------------------------------------------------

NARROW = [
    ("score functions", "squared"),
    ("score functions", "alibi"),
    ("captured tensors", "distances"),
    ("learned tensors", "network"),
    ("mask functions", "causal documents"),
    ("shapes", "groups, not squared"),
    ("decoding", "paged"),
]


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("group", "name"), NARROW, ids=[f"{group}: {name}" for group, name in NARROW])
def test_narrow_dtypes(group, name, dtype):
    """At most twice the error of the dense computation in the same dtype, and that of scores minus lse in float32."""
    case = build_case(group, name)
    right = Answer(case, 3)
    for t in right.leaves[:3]:
        t.data = t.data.to(dtype).double()  # what every dtype represents
    right.dout = right.dout.to(dtype).double()
    right.out, right.lse, _ = dense(case, right.q, right.k, right.v, right.score)
    expected = [right.out, right.lse, *right.gradients(right.out)]
    narrow = [t.detach().to(dtype).requires_grad_() for t in (right.q, right.k, right.v)]

    def results(out, lse):
        leaves = [*narrow, *case.learned]
        actual = torch.autograd.grad(out, leaves, right.dout.to(dtype), allow_unused=True, retain_graph=True)
        return [out, lse, *zeros_for_none(actual, leaves)]

    gqa = case.groups != case.heads
    actual = ls.flex_attention(*narrow, right.score, case.block_mask(), case.scale, gqa, return_lse=True)
    assert (actual[0].dtype, actual[1].dtype) == (dtype, torch.float32)
    theirs = results(*dense(case, *narrow, right.score)[:2])
    top = 1 + right.lse.masked_fill(right.lse.isneginf(), 0.0).abs().max()
    for i, (a, b, c) in enumerate(zip(results(*actual), theirs, expected, strict=True)):
        hidden = c.isneginf()
        assert torch.equal(a.isneginf(), hidden)
        ours, plain = ((t.double() - c).masked_fill(hidden, 0.0).square().mean().sqrt() for t in (a, b))
        rounding = torch.finfo(torch.float32).eps * top * c.masked_fill(hidden, 0.0).square().mean().sqrt()
        assert ours <= 2 * plain + rounding, f"result {i}: {ours} and {plain}"


LAYOUTS = {
    "heads inside": lambda draw, b, h, n, d: draw(b, n, h, d).transpose(1, 2),
    "batch inside": lambda draw, b, h, n, d: draw(h, n, b, d).permute(2, 0, 1, 3),
    "features outside": lambda draw, b, h, n, d: draw(b, h, d, n).transpose(2, 3),
    "one of three": lambda draw, b, h, n, d: draw(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    "offset": lambda draw, b, h, n, d: draw(b * h * n * d + 9)[9:].view(b, h, n, d),
    "rows left out": lambda draw, b, h, n, d: draw(b, h, 2 * n, d)[:, :, ::2],
    "features left out": lambda draw, b, h, n, d: draw(b, h, n, d + 3)[..., 1:-2],
    "last rows left out": lambda draw, b, h, n, d: draw(b, h, n + 7, d)[:, :, :-7],
    "heads shared": lambda draw, b, h, n, d: draw(b, 1, n, d).expand(b, h, n, d),
    "rows shared": lambda draw, b, h, n, d: draw(1, h, n, d).expand(b, h, n, d),
    "tokens shared": lambda draw, b, h, n, d: draw(b, h, 1, d).expand(b, h, n, d),
}


@pytest.mark.parametrize("keys", [20, 13, 27])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_in_memory(name, keys):
    """Results, gradients and the order of dims in memory, which PyTorch takes from the query."""
    draw = torch.Generator().manual_seed(keys)
    bases = []

    def base(*shape):
        bases.append(torch.randn(shape, generator=draw, dtype=F64).requires_grad_())
        return bases[-1]

    others = list(LAYOUTS.values())
    kinds = LAYOUTS[name], others[keys % len(others)], others[(keys + len(name)) % len(others)]
    q, k, v = (kind(base, 2, 3, n, 4) for kind, n in zip(kinds, (20, keys, keys), strict=True))
    dout = torch.randn(2, 20, 3, 4, generator=draw, dtype=F64).transpose(1, 2)
    mask = create_block_mask(causal, None, None, 20, keys, device="cpu", BLOCK_SIZE=8)
    out = ls.flex_attention(q, k, v, alibi, mask)
    plain = ls.flex_attention(*(t.contiguous() for t in (q, k, v)), alibi, mask)
    close(out, plain, "out")
    assert out.stride(3) == 1
    pairs = [(a, b) for a in range(3) for b in range(3) if q.stride(a) > q.stride(b)]
    assert all(out.stride(a) > out.stride(b) for a, b in pairs)
    assert out.numel() == out.untyped_storage().nbytes() // 8  # no memory of padding is kept
    for a, b in zip(*(torch.autograd.grad(o, bases, dout) for o in (out, plain)), strict=True):
        close(a, b, "gradient")


def test_output_of_a_projection_can_be_viewed():
    x = torch.randn(2, 24, 3 * 32)
    q, k, v = x.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    assert ls.flex_attention(q, k, v).transpose(1, 2).view(2, 24, 32).is_contiguous()


def test_one_tensor_as_query_key_and_value():
    x, y = (torch.randn(2, 3, 20, 4, dtype=F64).requires_grad_() for _ in range(2))
    y.data = x.data
    dout = torch.randn_like(x)
    actual = torch.autograd.grad(ls.flex_attention(x, x, x, alibi, masks.causal()), x, dout)[0]
    parts = [y.clone() for _ in range(3)]
    close(actual, torch.autograd.grad(ls.flex_attention(*parts, alibi, masks.causal()), y, dout)[0], "gradient")


# -- what is returned, and what gets a gradient ------------------------------------------------------------------------


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("max_scores", [False, True])
def test_auxiliary_results(lse, max_scores):
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 2, 21, 4))
    out, aux = ls.flex_attention(q, k, v, alibi, return_aux=AuxRequest(lse=lse, max_scores=max_scores))
    assert isinstance(aux, AuxOutput)
    assert torch.equal(out, ls.flex_attention(q, k, v, alibi))
    for requested, actual, learns in ((lse, aux.lse, True), (max_scores, aux.max_scores, False)):
        assert (actual is not None) == requested
        if actual is not None:
            assert (actual.shape, actual.dtype, actual.requires_grad) == ((2, 2, 21), torch.float32, learns)


@pytest.mark.parametrize("expected", ["q", "k", "v", "bias", "qk", "kv", "qv", "qk bias", "v bias"])
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_some_inputs_need_gradients(expected, of):
    draw = torch.Generator().manual_seed(len(expected))
    tensors = {name: torch.randn(2, 3, 20, 4, generator=draw, dtype=F64) for name in "qkv"}
    tensors["bias"] = torch.randn(20, generator=draw, dtype=F64)
    dout, dlse = torch.randn(2, 3, 20, 4, generator=draw, dtype=F64), torch.randn(2, 3, 20, generator=draw, dtype=F64)

    def gradients(names):
        given = {name: t.clone().requires_grad_(name in names) for name, t in tensors.items()}
        q, k, v, bias = given.values()
        out, lse = ls.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], masks.causal(), return_lse=True)
        assert out.requires_grad
        pairs = [(out, dout)] * (of != "lse") + [(lse, dlse)] * (of != "out")
        outputs, given_gradients = zip(*pairs, strict=True)
        leaves = {name: t for name, t in given.items() if t.requires_grad}
        actual = torch.autograd.grad(outputs, list(leaves.values()), given_gradients, allow_unused=True)
        return dict(zip(leaves, zeros_for_none(actual, leaves.values()), strict=True))

    everything = gradients(tensors)
    for name, actual in gradients([name for name in tensors if name in expected]).items():
        close(actual, everything[name], name)
        assert (actual != 0).any() == (name != "v" or of != "lse")


def test_derivatives_by_differences():
    inputs = [torch.randn(1, 2, 5, 3, dtype=F64).requires_grad_() for _ in range(3)]
    table = torch.randn(2, 5, dtype=F64).requires_grad_()

    def call(q, k, v, table):
        score = lambda s, b, h, i, j: torch.sin(s) * table[h, j] + s * table[h, i]  # noqa: E731
        return ls.flex_attention(q, k, v, score, masks.causal(), return_lse=True)

    assert torch.autograd.gradcheck(call, (*inputs, table))


@pytest.mark.parametrize("hides", ["mask", "score", "both"])
def test_rows_without_keys(hides):
    """Their output and gradients are 0, whatever the gradient of their lse of minus infinity."""
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 24, 8))
    seen = lambda b, h, i, j: i < 12  # noqa: E731
    score = None if hides == "mask" else lambda s, b, h, i, j: torch.where(i < 12, s, -torch.inf)
    block = None if hides == "score" else create_block_mask(seen, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    out, lse = ls.flex_attention(q, k, v, score, block, return_lse=True)
    assert torch.equal(out[:, :, 12:], torch.zeros(2, 4, 12, 8))
    assert lse[:, :, 12:].isneginf().all()
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    assert all(g.isfinite().all() for g in grads)
    assert torch.equal(grads[0][:, :, 12:], torch.zeros(2, 4, 12, 8))
    assert (grads[0][:, :, :12] != 0).all()


WITHOUT_VALUE = {
    "inverse": lambda s, b, h, i, j: 1 / s,
    "logarithm": lambda s, b, h, i, j: torch.where(s > 0, torch.log(s), s),
    "root": lambda s, b, h, i, j: s.abs().sqrt(),
}


@pytest.mark.parametrize("keys", [24, 9, 40])
@pytest.mark.parametrize("name", WITHOUT_VALUE)
def test_functions_without_a_value_at_0(name, keys):
    """Padding to one length has scores of 0, where these functions or their derivatives are not finite."""
    case = Case(WITHOUT_VALUE[name], mask=causal, keys=keys)
    right = Answer(case, keys)
    out = ls.flex_attention(right.q, right.k, right.v, case.score, case.block_mask())
    close(out, right.out, "out")
    for a, b in zip(right.gradients(out), right.gradients(right.out), strict=True):
        close(a, b, "gradient")


@pytest.mark.parametrize("name", WITHOUT_VALUE)
def test_keys_of_zeros_that_are_hidden(name):
    """They change nothing: the call without them has the same results and gradients."""
    score = WITHOUT_VALUE[name]
    q, k, v, dout = (torch.randn(2, 4, 24, 8, dtype=F64) for _ in range(4))
    k[:, :, 19:] = 0.0
    block = create_block_mask(lambda b, h, i, j: j < 19, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    calls = ls.flex_attention(q, k, v, score, block), ls.flex_attention(q, k[:, :, :19], v[:, :, :19], score)
    close(*calls, "out")
    for a, b in zip(*(torch.autograd.grad(out, leaves, dout) for out in calls), strict=True):
        close(a, b, "gradient")


def test_merged_halves():
    """Two calls with complementary masks, merged by their lse, are one causal call; gradients too."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(2, 2, 49, 8, generator=draw, dtype=F64) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    near = lambda b, h, i, j: (i >= j) & (i - j <= 16)  # noqa: E731
    far = lambda b, h, i, j: (i >= j) & (i - j > 16)  # noqa: E731
    parts = [
        ls.flex_attention(*inputs, None, create_block_mask(mask, None, None, 49, 49, "cpu", 16), return_lse=True)
        for mask in (near, far)
    ]
    top = torch.maximum(parts[0][1], parts[1][1])
    weights = [torch.exp(lse - top).unsqueeze(-1) for _, lse in parts]
    merged = sum(out * w for (out, _), w in zip(parts, weights, strict=True)) / sum(weights)
    whole = ls.flex_attention(*inputs, None, masks.causal())
    close(merged, whole, "out")
    for a, b in zip(*(torch.autograd.grad(o, inputs, dout) for o in (merged, whole)), strict=True):
        close(a, b, "gradient")


# -- several calls -----------------------------------------------------------------------------------------------------


def test_calls_in_turn():
    """Functions alternate, as do masks; one output is the next query."""
    draw = torch.Generator().manual_seed(2)
    tensors = [torch.randn(1, 4, 30, 8, generator=draw, dtype=F64).requires_grad_() for _ in range(7)]
    q, keys, values = tensors[0], tensors[1:4], tensors[4:]
    scores = (lambda s, b, h, i, j: s + (i - j), lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))
    actual = expected = q
    for number, (k, v) in enumerate(zip(keys, values, strict=True)):
        case = Case(scores[number % 2], mask=(None, causal)[number % 2], batch=1, key_batch=1, queries=30, keys=30)
        actual = ls.flex_attention(actual, k, v, case.score, case.block_mask())
        expected = dense(case, expected, k, v, case.score)[0]
    close(actual, expected, "out")
    dout = torch.randn(1, 4, 30, 8, generator=draw, dtype=F64)
    for a, b in zip(*(torch.autograd.grad(o, tensors, dout) for o in (actual, expected)), strict=True):
        close(a, b, "gradient")


def test_one_function_for_many_shapes():
    """One function object, whose table and sizes change: nothing of an earlier call is left."""
    given = {}

    def score(s, b, h, i, j):
        return s * given["heads"][h] if given["multiplies"] else s + given["heads"][h] * (i - j)

    for number, (batch, heads, queries, keys) in enumerate(
        [(2, 4, 20, 20), (1, 2, 33, 8), (3, 4, 7, 50), (2, 8, 20, 20)]
    ):
        given.update(heads=torch.randn(heads, dtype=F64).requires_grad_(), multiplies=number % 2 == 0)
        case = Case(
            score, mask=causal, learned=(given["heads"],), batch=batch, key_batch=batch, heads=heads, groups=heads,
            queries=queries, keys=keys,
        )  # fmt: skip
        right = Answer(case, number)
        out = ls.flex_attention(right.q, right.k, right.v, score, case.block_mask())
        close(out, right.out, "out")
        for a, b in zip(right.gradients(out), right.gradients(right.out), strict=True):
            close(a, b, "gradient")


@pytest.mark.share(2)
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """Compiled code, with shapes, functions, tables and block masks that change."""
    torch.compiler.reset()
    call = torch.compile(ls.flex_attention, backend="aot_eager", dynamic=dynamic)
    for number, (heads, length) in enumerate([(4, 16), (4, 24), (2, 17)]):
        table = torch.randn(heads, dtype=F64).requires_grad_()
        score = lambda s, b, h, i, j, table=table: s * table[h] - (i - j).abs()  # noqa: E731
        case = Case(
            score, mask=near_past, learned=(table,), heads=heads, groups=heads, queries=length, keys=length,
            created={"B": None, "H": None, "BLOCK_SIZE": 8},
        )  # fmt: skip
        right = Answer(case, number)
        out = call(right.q, right.k, right.v, score, case.block_mask())
        close(out, right.out, "out")
        gradients = torch.autograd.grad(out, right.leaves, right.dout)  # compiled code keeps nothing for a second time
        for a, b in zip(gradients, right.gradients(right.out), strict=True):
            close(a, b, "gradient")


def test_checkpointed():
    q, k, v, dout = torch.randn(4, 2, 4, 24, 8, dtype=F64)
    table = torch.randn(24, dtype=F64).requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v)] + [table]
    call = lambda *t: ls.flex_attention(*t, lambda s, b, h, i, j: s + table[j], masks.causal())  # noqa: E731
    kept, again = call(q, k, v), checkpoint(call, q, k, v, use_reentrant=False)
    for a, b in zip(*(torch.autograd.grad(o, leaves, dout) for o in (again, kept)), strict=True):
        assert torch.equal(a, b)


def test_pages_of_pytorch():
    """PyTorch's own page tables: their block masks list pages in the order of the text, one cache serves all rows."""
    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention").PagedAttention
    batch, heads, length, size, pages = 2, 4, 50, 8, 17
    tables = paged(pages, size, batch, device="cpu")
    for lengths in ((11, 30), (40, 35), (length, length)):  # so that the rows' pages alternate
        for row in range(batch):
            tables.reserve(torch.tensor(row), torch.tensor(lengths[row]))
    q, k, v = torch.randn(3, batch, heads, length, 8)
    k_cache, v_cache = torch.zeros(2, 1, heads, pages * size, 8)
    at = torch.arange(length, dtype=torch.int32).expand(batch, length)
    tables.assign(torch.arange(batch, dtype=torch.int32), at, k, v, k_cache, v_cache)
    mask = create_block_mask(near_past, batch, 1, length, length, device="cpu", BLOCK_SIZE=size)
    converted, score = tables.convert_logical_block_mask(mask), tables.get_score_mod(alibi)
    out = ls.flex_attention(q, k_cache, v_cache, score, converted)
    close(out, ls.flex_attention(q, k, v, alibi, mask), "out")


# -- refused calls, each with one that is accepted -------------------------------------------------------------------

X = torch.randn(2, 4, 24, 8)
TABLE = torch.ones(24, 24).tril().bool()


def flex(q=X, k=X, v=X, *arguments, **options):
    return ls.flex_attention(q, k, v, *arguments, **options)


def blocks(mask=causal, rows=None, heads=None, queries=24, keys=24, **options):
    return create_block_mask(mask, rows, heads, queries, keys, device="cpu", BLOCK_SIZE=8, **options)


def sliced(*, mended):
    part = blocks()[:, :, 0]
    if mended:
        part.mask_mod, part.seq_lengths = causal, (8, 24)
    return part


def hand_made(first, second):
    lists = torch.tensor([[[2, 1, 1]]]), torch.tensor([[[[0, 1, -1], [first, -1, -1], [second, -1, -1]]]])
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, mask_mod=causal)


REFUSED = {  # name: (accepted, refused, error, words); PyTorch's error has the same built-in type unless noted
    "3 dims": (flex, lambda: flex(X[0], X[0], X[0]), PlanError, "4 dims"),
    "5 dims": (flex, lambda: flex(*[X[None]] * 3), PlanError, "4 dims"),
    "dtype of keys": (flex, lambda: flex(k=X.half(), v=X.half()), PlanError, "k must be torch.float32"),
    "dtype of values": (flex, lambda: flex(v=X.double()), PlanError, "v must be torch.float32"),
    "integers": (flex, lambda: flex(*[X.long()] * 3), PlanError, "q must have dtype"),
    "float8 keys": (flex, lambda: flex(k=X.to(torch.float8_e4m3fn)), PlanError, "k must have dtype"),
    "device of keys": (flex, lambda: flex(k=X.to("meta")), PlanError, "k must be torch.float32 on cpu"),
    "nested": (
        flex,
        lambda: flex(*[torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged)] * 3),
        PlanError,
        "nested",
    ),
    "a list": (flex, lambda: flex(X.tolist()), PlanError, "q must be a torch.Tensor"),
    "key heads": (
        lambda: flex(X, X[:, :2], X[:, :2], enable_gqa=True),
        lambda: flex(X, X[:, :2], X[:, :2]),
        PlanError,
        "enable_gqa=True",
    ),
    "groups": (
        lambda: flex(X, X[:, :2], X[:, :2], enable_gqa=True),
        lambda: flex(X, X[:, :3], X[:, :3], enable_gqa=True),
        ScheduleError,
        "multiple of kv_heads",
    ),
    "more key heads": (flex, lambda: flex(X[:, :2], X, X, enable_gqa=True), ScheduleError, "multiple of kv_heads"),
    "value heads": (flex, lambda: flex(v=X[:, :2]), PlanError, "value must have"),
    "value tokens": (flex, lambda: flex(v=X[:, :, :9]), PlanError, "value must have"),
    "value rows": (flex, lambda: flex(v=X[:1]), PlanError, "value must have"),
    "value rows, one row of keys": (
        lambda: flex(X, X[:1], X[:1]),
        lambda: flex(X, X[:1], torch.cat([X, X])[:3]),
        PlanError,
        "value must have",
    ),
    "key features": (lambda: flex(v=X[..., :3]), lambda: flex(k=X[..., :3]), PlanError, "k must have shape"),
    "key rows": (lambda: flex(X, X[:1], X[:1]), lambda: flex(X[:1]), PlanError, "key must have the 1 batch rows"),
    "no batch rows": (lambda: flex(*[X[:1]] * 3), lambda: flex(*[X[:0]] * 3), ScheduleError, "batch must be"),
    "no features": (
        lambda: flex(*[X[..., :1]] * 3),
        lambda: flex(*[X[..., :0]] * 3),
        ScheduleError,
        "head_dim must be",
    ),
    "mask of fewer tokens": (
        lambda: flex(block_mask=blocks()),
        lambda: flex(block_mask=blocks(queries=16, keys=16)),
        PlanError,
        "got 16 and 16",
    ),
    "mask of more tokens": (
        lambda: flex(block_mask=blocks()),
        lambda: flex(block_mask=blocks(queries=32, keys=32)),
        PlanError,
        "got 32 and 32",
    ),
    "mask of other rows": (
        lambda: flex(block_mask=blocks(rows=2)),
        lambda: flex(block_mask=blocks(rows=3)),
        MaskError,
        "1 or 2 batch rows",
    ),
    "mask of other heads": (
        lambda: flex(block_mask=blocks(heads=4)),
        lambda: flex(block_mask=blocks(heads=2)),
        MaskError,
        "1 or 4 heads",
    ),
    "one plane, rows differ": (
        lambda: flex(block_mask=blocks(lambda b, h, i, j: i + b >= j, rows=2)),
        lambda: flex(block_mask=blocks(lambda b, h, i, j: i + b >= j)),
        MaskError,
        "mask_mod uses b",
    ),  # PyTorch computes block lists for the first row only
    "one plane, heads differ": (
        lambda: flex(block_mask=blocks(lambda b, h, i, j: i + h >= j, heads=4)),
        lambda: flex(block_mask=blocks(lambda b, h, i, j: i + h >= j)),
        MaskError,
        "mask_mod uses h",
    ),
    "a slice": (
        lambda: flex(X[:, :, :8], block_mask=sliced(mended=True)),
        lambda: flex(block_mask=sliced(mended=False)),
        MaskError,
        "a slice of a BlockMask",
    ),
    "a slice, its queries": (
        lambda: flex(block_mask=blocks(rows=2)),
        lambda: flex(X[:, :, :8], block_mask=sliced(mended=False)),
        MaskError,
        "a slice of a BlockMask",
    ),
    "a block twice": (
        lambda: flex(block_mask=hand_made(0, 2)),
        lambda: flex(
            block_mask=BlockMask.from_kv_blocks(
                torch.tensor([[[2, 1, 1]]]), torch.tensor([[[[1, 1, 0]] * 3]]), BLOCK_SIZE=8, mask_mod=causal
            )
        ),
        MaskError,
        "block_mask must list every block once",
    ),
    "mask without data": (
        lambda: flex(block_mask=blocks()),
        lambda: flex(block_mask=blocks().to("meta")),
        MaskError,
        "meta device",
    ),
    "a table as mask": (
        lambda: flex(block_mask=masks.from_dense(TABLE)),
        lambda: flex(block_mask=TABLE),
        PlanError,
        "block_mask must be",
    ),
    "a function as mask": (
        lambda: flex(block_mask=masks.from_mask_mod(causal, 24)),
        lambda: flex(block_mask=causal),
        PlanError,
        "block_mask must be",
    ),
    "lse twice": (
        lambda: flex(return_lse=True),
        lambda: flex(return_lse=True, return_aux=AuxRequest(lse=True)),
        PlanError,
        "return_lse must be False",
    ),
    "return_aux": (
        lambda: flex(return_aux=AuxRequest()),
        lambda: flex(return_aux=True),
        PlanError,
        "return_aux must be",
    ),
    "kernel options": (
        lambda: flex(kernel_options={}),
        lambda: flex(kernel_options={"BACKEND": "TRITON"}),
        KernelError,
        "kernel_options must be empty",
    ),
    "scale": (lambda: flex(scale=2), lambda: flex(scale=float("inf")), PlanError, "scale must be a finite number"),
    "score_mod": (
        lambda: flex(score_mod=alibi),
        lambda: flex(score_mod=blocks()),
        KernelError,
        "score_mod must be a function",
    ),
    "arguments": (lambda: flex(score_mod=alibi), lambda: flex(score_mod=causal), KernelError, "these 5 arguments"),
    "integer scores": (
        lambda: flex(score_mod=lambda s, b, h, i, j: (i - j).float()),
        lambda: flex(score_mod=lambda s, b, h, i, j: i - j),
        KernelError,
        "floating-point tensor",
    ),
    "boolean scores": (
        lambda: flex(block_mask=blocks()),
        lambda: flex(score_mod=lambda s, b, h, i, j: i >= j),
        KernelError,
        "To hide pairs use a mask",
    ),
    "scores of another shape": (
        lambda: flex(score_mod=lambda s, b, h, i, j: s + torch.zeros(3).sum()),
        lambda: flex(score_mod=lambda s, b, h, i, j: s + torch.zeros(3)),
        KernelError,
        "one score for a pair",
    ),
    "a branch": (
        lambda: flex(score_mod=lambda s, b, h, i, j: torch.where(i > j, s, -s)),
        lambda: flex(score_mod=lambda s, b, h, i, j: s if i > j else -s),
        RuntimeError,
        "data-dependent control flow",
    ),
    "second derivatives": (
        lambda: flex(X.clone().requires_grad_()).sum().backward(),
        lambda: second_derivative(),
        PlanError,
        "must not be differentiated again",
    ),
}


def second_derivative():
    x = X.clone().requires_grad_()
    first = torch.autograd.grad(flex(x).square().sum(), x, create_graph=True)[0]
    torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    accepted, refused, error, words = REFUSED[name]
    accepted()
    with pytest.raises(error, match=re.escape(words)):
        refused()
