"""Score functions inside of compiled graphs: right, with all gradients, compiled once, or refused by name."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.errors import KernelError
from longspan.versions import minor
from tests.gloo import compiled_score_work as work
from tests.gloo.compiled_work import Counting
from tests.pool import pool

pytestmark = [  # PyTorch's compiler uses what PyTorch warns of
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CASES = work.cases()
OTHER_WORDS = "" if minor(torch.__version__) >= (2, 13) else "|every call creates|trace builtin operator `setattr`"
"""In which older compilers refuse the same: modes do not see calls that make tensors, classes cannot count."""


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.share(5)
@pytest.mark.parametrize("first", range(0, 40, 4))
def test_a_model_of_four_layers(first):
    """40 cases in ten models: against eager calls and against every pair written out; new batches compile nothing."""
    chosen = CASES[first : first + 4]
    net, compiler = work.Net(chosen, first), Counting("inductor")
    compiled = torch.compile(lambda x, masks: net(x, work.by_longspan, masks), backend=compiler, fullgraph=True)
    for n in range(3):
        x, dout = work.batch(n)
        masks = [work.masked(case.mask, work.S) for case in chosen]
        found, eager, dense = (
            work.answers(net, x, dout, call)
            for call in (
                lambda x, masks=masks: compiled(x, masks),
                lambda x, masks=masks: net(x, work.by_longspan, masks),
                lambda x, masks=masks: net(x, work.by_pairs, masks),
            )
        )
        assert work.worst(found, eager) < work.LIMIT, (chosen, n)
        assert work.worst(found, dense) < work.LIMIT, (chosen, n)
        assert compiler.made == 1, (chosen, n)


def test_there_are_forty_cases():
    assert len(set(CASES)) == 40
    assert {case.score for case in CASES} == {*work.GIVEN, *work.MADE}


LENGTH_FREE = ("soft_cap", "composition", "gated_by_tokens")


@pytest.mark.share(3)
@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2), (False, 3)])
def test_lengths_may_change(dynamic, most):
    chosen = [work.Case(score, "causal") for score in LENGTH_FREE]
    net, compiler, mask = work.Net(chosen), Counting("aot_eager"), ls.masks.causal()
    compiled = torch.compile(
        lambda x: net(x, work.by_longspan, [mask] * len(chosen)), backend=compiler, fullgraph=True, dynamic=dynamic
    )
    for length in (40, 24, 33, 17, 64, 40, 24) if dynamic is not False else (40, 24, 17, 24):
        x, dout = work.batch(length, length)
        found, expected = (
            work.answers(net, x, dout, call)
            for call in (compiled, lambda x, n=length: net(x, work.by_pairs, [ls.masks.causal(n)] * len(chosen)))
        )
        assert work.worst(found, expected) < work.LIMIT
    assert compiler.made <= most


def test_whole_numbers_that_change_are_no_part_of_the_graph():
    """Seeds, widths and the like: PyTorch compiles once more, for all others. Other numbers are part of the graph."""
    compiler, mask = Counting(), ls.masks.causal()

    def call(q, seed, width):
        return ls.attention(
            q, q, q, mask, softcap=3.0, dropout=0.3, seed=seed,
            score_mod=lambda s, b, h, i, j: torch.where(i - j < width, s, s * width),
        )  # fmt: skip

    compiled = torch.compile(call, backend=compiler, fullgraph=True)
    q = torch.randn(1, 2, 32, 8, dtype=torch.float64)
    for n in range(1, 8):
        given = 1 << n * 7, 3 * n
        assert float((compiled(q, *given) - call(q, *given)).abs().max()) < 1e-13
    assert compiler.made <= 2


@pytest.mark.share(2)
@pytest.mark.parametrize("kernel", ["reference", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_and_dtypes_do_what_they_do_outside(kernel, dtype):
    """Bit for bit: the same operations in the same order."""
    slopes = torch.randn(2, requires_grad=True)
    mask = ls.masks.documents([20, 12]) & ls.masks.causal()

    def call(q):
        return ls.attention(
            q, q, q, mask, kernel=kernel, score_mod=lambda s, b, h, i, j: 9 * torch.tanh(s / 9) - slopes[h] * (i - j)
        )

    q = torch.randn(1, 2, 32, 16).to(dtype).requires_grad_()
    dout = torch.randn(1, 2, 32, 16).to(dtype)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, expected = ((run(q), *torch.autograd.grad(run(q), (q, slopes), dout)) for run in (compiled, call))
    assert all(map(torch.equal, found, expected))


def test_flex_attention_compiles_whole():
    table = torch.randn(16, 2, requires_grad=True)
    mask = ls.masks.causal(32)
    layout = ls.layouts.contiguous(32, 1)
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")

    def call(q, **where):
        return ls.flex_attention(q, q, q, lambda s, b, h, i, j: s + table[(i - j).abs().clamp(max=15), h], **where)

    q, dout = torch.randn(2, 1, 2, 32, 8)
    q.requires_grad_()
    for where in ({"block_mask": mask}, {"plan": plan}):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        found, expected = (torch.autograd.grad(run(q, **where), (q, table), dout) for run in (compiled, call))
        assert all(map(torch.equal, found, expected))


def test_modes_without_gradients_and_recomputed_layers():
    chosen = [work.Case("positive_slopes", "causal"), work.Case("gated_by_tokens", "documents")]
    net = work.Net(chosen)
    masks = [work.masked(case.mask, work.S) for case in chosen]
    x, dout = work.batch(0)
    expected = work.answers(net, x, dout, lambda x: net(x, work.by_pairs, masks))
    compiled = torch.compile(lambda x: net(x, work.by_longspan, masks), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert work.worst([compiled(x)], expected[:1]) < work.LIMIT
    around = lambda x: checkpoint(compiled, x, use_reentrant=False)  # noqa: E731
    assert work.worst(work.answers(net, x, dout, around), expected) < work.LIMIT


@pytest.mark.filterwarnings("ignore:a score function cannot be compiled")
def test_a_checkpoint_inside_of_the_compiled_part():
    chosen = [work.Case("gated_by_tokens", "documents")]
    net, masks = work.Net(chosen), [work.masked("documents", work.S)]
    x, dout = work.batch(0)
    call = lambda x: checkpoint(net, x, work.by_longspan, masks, use_reentrant=False)  # noqa: E731
    found, expected = (work.answers(net, x, dout, run) for run in (torch.compile(call, backend="aot_eager"), call))
    assert work.worst(found, expected) < work.LIMIT
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="let the checkpoint be around the compiled part"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(x)


def test_a_bias_of_another_length_is_refused_when_the_graph_runs():
    mask = ls.masks.causal(16)
    call = torch.compile(
        lambda q, bias: ls.attention(q, q, q, mask, bias=bias), backend="aot_eager", fullgraph=True, dynamic=True
    )
    q = torch.randn(1, 2, 16, 8)
    fits = torch.randn(1, 2, 16, 16)
    assert torch.equal(call(q, fits), ls.attention(q, q, q, mask, bias=fits))
    with pytest.raises(KernelError, match=r"bias has shape \(1, 2, 17, 17\), but it is indexed by global"):
        call(q, torch.randn(1, 2, 17, 17))
    with pytest.raises(KernelError, match="seed = -1"):
        torch.compile(lambda q: ls.attention(q, q, q, mask, dropout=0.1, seed=-1), backend="aot_eager")(q)


# -- what cannot be compiled -------------------------------------------------------------------------------------------

TABLE = torch.nn.Parameter(torch.randn(8, dtype=torch.float64))
FIXED = torch.randn(3, 4, dtype=torch.float64)


class StraightThrough(torch.autograd.Function):
    """A backward of its own, which `torch.vmap` can map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Counted:
    calls = 0


def counts(s, b, h, i, j):
    Counted.calls += 1
    return s * Counted.calls


def writes(s, b, h, i, j):
    FIXED.add_(0)
    return s


UNCOMPILED = {
    "own backward": (lambda s, b, h, i, j: StraightThrough.apply(s) + s, "autograd.Function"),
    "own backward of a capture": (lambda s, b, h, i, j: s * StraightThrough.apply(TABLE[h]), "autograd.Function"),
    "vmap": (lambda s, b, h, i, j: s + torch.vmap(lambda x: x * i)(FIXED).sum(), "every call creates"),
    "operator by its schema": (lambda s, b, h, i, j: torch.ops.aten.sin(s), "it uses sin"),
}


@pytest.mark.share(2)
@pytest.mark.filterwarnings("ignore:a score function cannot be compiled")
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_written_down_is_refused_by_name_or_run_outside(name):
    function, why = UNCOMPILED[name]
    mask = ls.masks.causal()
    q, dout = torch.randn(2, 1, 2, 8, 4, dtype=torch.float64)
    q.requires_grad_()

    def call(q):
        return ls.attention(q, q, q, mask, score_mod=function)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"longspan: a score function cannot be compiled:.*{why}"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    torch._dynamo.reset()
    outside = torch.compile(call, backend="aot_eager")
    found, expected = (torch.autograd.grad(run(q), (q, TABLE), dout, allow_unused=True) for run in (outside, call))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.warns(UserWarning, match=f"a score function cannot be compiled and causes a graph break.*{why}"):
        outside(q)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda s, b, h, i, j: s + torch.rand(()), "draws random numbers by rand"),
        (writes, "changes a tensor that it captured in place, by add_"),
        (counts, "does not do the same in every call"),
        (lambda s, b, h, i, j: s * TABLE[0].item(), "looks at values, by item"),
        (lambda s, b, h, i, j: s if TABLE.sum() > 0 else -s, "[Dd]ata-dependent branching"),
    ],
)
def test_what_would_be_recorded_wrongly_is_refused(function, why):
    mask = ls.masks.causal()
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    call = torch.compile(lambda q: ls.attention(q, q, q, mask, score_mod=function), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why + OTHER_WORDS):
        call(q)


# -- over ranks --------------------------------------------------------------------------------------------------------

OVER_RANKS = [
    work.Case("positive_slopes", "documents"), work.Case("t5_table", "causal"), work.Case("bias_tensor", "window"),
    work.Case("everything", "opaque"),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "num_batches"), [("aot_eager", 4), ("inductor", 2)])
def test_over_ranks(backend, num_batches):
    for error, made in pool(2).run(work.over_ranks, OVER_RANKS, backend, num_batches, timeout=600):
        assert error < work.LIMIT
        assert made == 1
