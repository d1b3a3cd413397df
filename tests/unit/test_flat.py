"""Flat programs: rows moved by tables, as on GPUs, come out as rows moved run by run, and nothing is done twice."""

import numpy as np
import pytest
import torch

from longspan import layouts, masks, plan
from longspan.kernels import kernel_named
from longspan.layouts import Layout
from longspan.run import moves, program, tables, walk
from longspan.run.merge import merge
from longspan.run.moves import Move, group_operations, levels_of
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.recorder import Kind, Recorder
from longspan.run.transports import Loopback
from longspan.testing.loopback import run_loopback
from tests.flat_rows import Played, by_tables
from tests.kernel_models import rows as models

SCHEMES = ["ring", "exchange", "all_gather", "all_to_all", "hybrid(2)", "hybrid(2,exchange)", "staged"]


def drawn(seed, scheme):
    """A random plan of four ranks, and inputs for it."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 40, draw.integers(1, 9)).tolist()
    total = sum(lengths)
    mask = masks.documents(lengths) & (masks.causal() if draw.random() < 0.7 else masks.sliding_window(5, 3))
    cuts = np.sort(draw.choice(np.arange(1, max(total, 12)), min(11, total - 1), replace=False)) if total > 12 else []
    ends = [0, *[int(c) for c in cuts if c < total], total]
    spans = [[] for _ in range(4)]
    for i in draw.permutation(len(ends) - 1):
        spans[int(draw.integers(4))].append((ends[i], ends[i + 1]))
    layout = Layout.from_spans(total, spans, name="drawn") if draw.random() < 0.6 else layouts.zigzag(total, 4)
    dims = [(8, 8), (8, 12), (5, 3)][int(draw.integers(3))]
    dtype = [torch.float32, torch.bfloat16, torch.float64][int(draw.integers(3))]
    sizes = {"q_heads": 8, "kv_heads": 4, "head_dim": dims[0], "v_head_dim": dims[1], "batch": int(draw.integers(1, 3))}
    made = plan(mask, layout, scheme=scheme, dtype=dtype, keep=bool(draw.integers(2)), **sizes)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, dims[0]), (4, dims[0]), (4, dims[1]), (8, dims[1])]
    inputs = [torch.randn(sizes["batch"], h, total, d, generator=generator).to(dtype) for h, d in shapes]
    if (dim := int(draw.integers(4))) in (2, 3):  # tokens before heads, as models have them, or features before tokens
        inputs = [x.transpose(dim - 1, dim).contiguous().transpose(dim - 1, dim) for x in inputs]
    return made, inputs


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_and_runs_give_the_same_bits(scheme, monkeypatch):
    for seed in range(10):
        made, inputs = drawn(seed, scheme)
        right = run_loopback(made, *inputs, kernel="reference")
        with monkeypatch.context() as patch, models.installed():
            patch.setattr(walk, "memory_for", by_tables)
            found = run_loopback(made, *inputs, kernel="reference")
            again = run_loopback(made, *inputs, kernel="reference")
        for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), found, right, again, strict=True):
            assert torch.equal(a, b), f"{name} of seed {seed}, {made!r}"
            assert torch.equal(a, c), f"{name} of seed {seed} when played again"


@pytest.mark.parametrize("column", range(10))
def test_a_line_that_is_one_off_is_noticed(column, monkeypatch):
    """Every number of every line matters: first programs, flags, rows, heads, and the places of both sides."""
    made, inputs = drawn(1, "hybrid(2,exchange)")
    right = run_loopback(made, *inputs, kernel="reference")
    walk._built.pop(made)  # with its tables
    original = moves.table_of

    def one_off(items):
        table = original(items)
        for lines in (move.lines[-1] for move in items if move.lines):
            if column or lines.high > lines.low + 1:
                table[lines.high - 1, column] += 16 if column in (5, 6, 8, 9) else 1
        return table

    monkeypatch.setattr(program, "table_of", one_off)
    monkeypatch.setattr(walk, "memory_for", by_tables)
    with models.installed():
        try:
            found = run_loopback(made, *inputs, kernel="reference")
        except (IndexError, RuntimeError):  # rows outside of the memory
            return
        finally:
            walk._built.pop(made)  # the plan is cached
    assert any(not torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_nothing_is_worked_out_twice(monkeypatch):
    """A second call walks no steps, makes no table, and uses what the first has recorded."""
    made, inputs = drawn(1, "hybrid(2,exchange)")
    monkeypatch.setattr(walk, "memory_for", by_tables)
    with models.installed():
        run_loopback(made, *inputs, kernel="reference")

        def not_again(*_):
            raise AssertionError("worked out again")

        monkeypatch.setattr(walk.Walk, "program", not_again)
        monkeypatch.setattr(program, "table_of", not_again)
        monkeypatch.setattr(tables, "copy_to_device", not_again)
        run_loopback(made, *inputs, kernel="reference")


def test_levels_keep_what_depends_on_each_other_apart():
    recorder = Recorder()
    a, b, c = (recorder.new((1, 2, 10, 4), torch.float32) for _ in range(3))
    b[:, :, 0:4].copy_(a[:, :, 0:4])
    b[:, :, 6:9].copy_(a[:, :, 1:4])
    b[:, :, 2:3].add_(c[:, :, 0:1])  # waits for the first
    b[:, :1, 3:4].add_(c[:, :1, 0:1])
    b[:, 1:, 3:4].add_(c[:, 1:, 0:1])  # other heads: does not wait for the one before
    c[:, :, 0:1].fill_(1.0)  # what was read before is written
    assert levels_of(recorder.log) == [1, 1, 2, 2, 2, 3]
    groups = group_operations(recorder.log)
    assert [(group.kind, len(group.lanes)) for group in groups] == [(Kind.COPY, 1), (Kind.ADD, 3), (Kind.FILL, 1)]
    assert groups[0].lanes[0].runs == [(0, 0, 4), (6, 1, 3)]


@pytest.mark.parametrize("by_index", [False, True])
def test_noted_operations_in_any_order_of_places(by_index):
    """Random copies, sums and fills between three tensors and a message, against the same done at once."""
    for seed in range(60):
        draw, played = np.random.default_rng(seed), Played(by_index)
        tensors = [torch.randn(2, 3, 12, 4, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]
        right, rows = [t.clone() for t in tensors], [played.rows(t) for t in tensors]
        for _ in range(int(draw.integers(1, 14))):
            to, of = draw.permutation(3)[:2]
            size, kind = int(draw.integers(1, 6)), int(draw.integers(3))
            there, here = (int(draw.integers(0, 13 - size)) for _ in range(2))
            heads = slice(int(draw.integers(0, 2)), int(draw.integers(2, 4)))
            target, source = ((slice(None), heads, slice(at, at + size)) for at in (there, here))
            if kind == 0:
                right[to][target] = right[of][source]
                rows[to][target].copy_(rows[of][source])
            elif kind == 1:
                right[to][target] += right[of][source]
                rows[to][target].add_(rows[of][source])
            else:
                right[to][target] = 2.5
                rows[to][target].fill_(2.5)
        with models.installed():
            results = played.tensors(*rows)
        for found, wanted in zip(results, right, strict=True):
            assert torch.equal(found, wanted), seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_any_strides_are_moved_and_filled_by_tables(dtype):
    """Gradients may lie with their tokens last (`conv1d`), or be one number for all (`sum`); -inf has bits in the upper
    half of a double only."""
    for source in (torch.randn(2, 3, 8, 40).to(dtype).mT, torch.randn(()).to(dtype).expand(2, 3, 40, 8)):
        played, right = Played(by_index=True), [torch.randn(2, 3, 40, 8).to(dtype) for _ in range(3)]
        rows, of = [played.rows(t.clone()) for t in right], played.rows(source)
        for at in range(0, 40, 4):  # more than FEW: fewer are filled by PyTorch
            there, here = (
                (slice(None), slice(1, 3), slice(at, at + 3)),
                (slice(None), slice(1, 3), slice(36 - at, 39 - at)),
            )
            rows[0][there].copy_(of[here])
            right[0][there] = source[here]
            rows[1][there].add_(of[here])
            right[1][there] += source[here]
            rows[2][there].fill_(-torch.inf)
            right[2][there] = -torch.inf
        with models.installed():
            results = played.tensors(*rows)
        assert all(map(torch.equal, results, right))


def test_a_part_of_a_message_is_merged():
    """No plan merges from a message; the kernel, which takes tensors only, must not be used for it."""
    played = Played(by_index=True)
    state = [torch.randn(1, 2, 6, d) for d in (4, 1, 1)]
    message = played.recorder.message(16 + 4 * 2 * 6 * 5)
    parts = [torch.randn(1, 2, 6, d) for d in (4, 1)]
    played.given[message.number] = torch.cat([torch.zeros(16), *(p.flatten() for p in parts)])[12:].view(torch.uint8)
    out, lse = (
        played.recorder.new(p.shape, p.dtype, inside=message, offset=at) for p, at in zip(parts, (16, 208), strict=True)
    )
    rows = [played.rows(t.clone()) for t in state]
    played.recorder.note(Kind.MERGE, *rows, out, lse)
    merge(state[0], *(t.squeeze(3) for t in state[1:]), parts[0], parts[1].squeeze(3))
    with models.installed():
        found = played.tensors(*rows)
    assert all(map(torch.equal, found, state))


def test_a_group_is_one_move_on_gpus():
    """Pieces for four peers are packed by as many moves as there are tensors, however many runs they have."""
    mask = masks.documents([7] * 40) & masks.causal()
    layout = layouts.striped(280, 4, stripe=5)
    made = plan(mask, layout, scheme="exchange", q_heads=4, kv_heads=4, head_dim=8, dtype="float32")
    run_loopback(made, *(torch.randn(1, 4, 280, 8) for _ in range(4)), kernel="reference")
    forward = [program for key, (*_, program) in walk._built[made].items() if key[1] == "forward"]
    packs = [[item for item in step.pack if isinstance(item, Move)] for program in forward for step in program.steps]
    assert max(map(len, packs)) == 1
    assert max(len(lane.runs) for pack in packs for move in pack for lane in move.lanes) > 1
    assert all(move.fused_with is not None for pack in packs for move in pack), "K and V go together"


@pytest.mark.parametrize("scheme", ["ring", "exchange", "all_gather", "all_to_all"])
def test_results_keep_no_messages_alive(scheme):
    """A gradient lives as long as the caller likes, and must not hold what other ranks sent."""
    mask, layout = masks.causal(64), layouts.zigzag(64, 4)
    made = plan(mask, layout, scheme=scheme, q_heads=4, kv_heads=4, head_dim=8, dtype="float32")
    own = [[layout.shard(torch.randn(1, 4, 64, 8), rank, 2) for _ in range(4)] for rank in range(4)]
    jobs = [walk.Job(made, rank, kernel_named("reference"), 0.3, torch.float32) for rank in range(4)]
    forward = Loopback().run([Forward(job, *x[:3]).program(saves=True) for job, x in zip(jobs, own, strict=True)])
    saved = [Saved(*x[:3], *found) for x, found in zip(own, forward, strict=True)]
    runs = [Backward(job, s, x[3]).program() for job, s, x in zip(jobs, saved, own, strict=True)]
    for gradients in Loopback().run(runs):
        for t in gradients:
            assert t.untyped_storage().nbytes() == t.nbytes


class Talkative:
    """A kernel that gives more, or longer, results than it said."""

    def __init__(self, change):
        self.kernel, self.change = kernel_named("reference"), change
        self.groups, self.backward = self.kernel.groups, self.kernel.backward

    def forward(self, work):
        return self.change(list(self.kernel.forward(work)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: iter([*found, found[0]]), "gave more than the 1 results"),
        (lambda found: iter([tuple(x[:, :, 1:] for x in found[0])]), "has 15 rows, not 16"),
    ],
)
def test_a_kernel_gives_what_it_said(change, message):
    made = plan(masks.causal(16), layouts.contiguous(16, 1), q_heads=1, kv_heads=1, head_dim=8, dtype="float32")
    q, k, v = (torch.randn(1, 1, 16, 8) for _ in range(3))
    job = walk.Job(made, 0, Talkative(change), 0.3, torch.float32)
    with pytest.raises(AssertionError, match=message):
        Loopback().run([Forward(job, q, k, v).program(saves=False)])
