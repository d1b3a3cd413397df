"""The one compiler from masks to torch functions: whole sequences and single ranks, on any device, compiled."""

import numpy as np
import pytest

from longspan import layouts, masks
from longspan.errors import MaskError
from longspan.masks.mask_mods import Place, predicate_mod, to_mask_mod
from longspan.masks.plane import Plane
from tests.cases import random_case

torch = pytest.importorskip("torch")
N = 24


def answers(mod, rows, heads, q_len, kv_len):
    """What a mask function says of every pair: (rows, heads, queries, keys)."""
    return np.array(
        [
            [mod(torch.tensor(b), torch.tensor(h), torch.arange(q_len)[:, None], torch.arange(kv_len)[None]).numpy()]
            for b, h in np.ndindex(rows, heads)
        ]
    ).reshape(rows, heads, q_len, kv_len)


def truth(mask, length):
    position = np.arange(length)
    each = np.ndindex(mask.num_rows, mask.num_heads)
    found = [mask.allows(position[:, None], position[None], row=b, head=h) for b, h in each]
    return np.array(found).reshape(mask.num_rows, mask.num_heads, length, length)


def varied():
    """Rows and heads that differ, one function in several of them, planes inside planes."""
    one = masks.from_mask_mod(lambda b, h, q, k: (q + k + b) % (h + 2) != 0, N, rows=2, heads=2)
    other = masks.from_mask_mod(lambda b, h, q, k: (q * 5 + k) % 7 < 4, N)
    rows = masks.per_row(masks.documents([9, 15]), masks.documents([N]))
    return {
        "closed form": rows & masks.causal(),
        "a function": one & masks.causal() & rows,
        "two functions": (one | ~(other & masks.chunked(6, N))) & rows,
        "one row without": masks.per_row(masks.causal(N), other | masks.sliding_window(2)),
        "nothing": masks.causal(N) & ~masks.causal(N),
    }


@pytest.mark.parametrize("name", varied())
def test_whole_sequences_and_ranks_say_what_the_mask_says(name):
    mask = varied()[name].resized(N)
    wanted = truth(mask, N)
    np.testing.assert_array_equal(answers(mask.to_mask_mod(), mask.num_rows, mask.num_heads, N, N), wanted)
    layout = layouts.zigzag(N, 5, equal_tokens=True)
    for rank in range(5):
        rows = np.where(layout.positions(rank) < N, layout.positions(rank), -1)
        local = to_mask_mod(mask.grid, Place(N, rows, rows, "cpu", mask.num_rows))
        found = answers(local, mask.num_rows, mask.num_heads, len(rows), len(rows))
        real = (rows >= 0)[:, None] & (rows >= 0)[None]
        np.testing.assert_array_equal(found, wanted[:, :, rows][..., rows] & real)


def test_random_masks():
    for seed in range(60):
        case = random_case(seed)
        mask, length = case.mask.resized(case.layout.seq_len), case.layout.seq_len
        np.testing.assert_array_equal(
            answers(mask.to_mask_mod(), mask.num_rows, mask.num_heads, length, length), truth(mask, length)
        )


@pytest.mark.parametrize("name", varied())
def test_indices_may_be_on_any_device(name):
    """The meta device stands for one that the tables are not on: mixing devices is refused by PyTorch."""
    mask = varied()[name].resized(N)
    with torch.device("meta"):
        b, h, q = torch.zeros((1, 1), dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64), torch.arange(N)
    found = mask.to_mask_mod()(b, h, q[:, None], q[None])
    assert (found.device.type, found.shape, found.dtype) == ("meta", (N, N), torch.bool)


def test_a_predicate_alone_is_asked_for_its_own_row_and_head():
    mask = masks.from_mask_mod(lambda b, h, q, k: (q + k) % 5 == 2 * b + h, N, rows=2, heads=2)
    mixed = ~(mask & masks.causal()) | masks.from_mask_mod(lambda b, h, q, k: q % 3 == k % 3, N)
    q, zero = torch.arange(N), torch.tensor(0)
    for b, h in np.ndindex(2, 2):
        for plane in (mask.plane(b, h), mixed.plane(b, h)):
            found = predicate_mod(plane.predicate, N)(None, zero, zero, q[:, None], q[None])
            wanted = plane.predicate.allows(np.arange(N)[:, None], np.arange(N)[None])
            np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # PyTorch's compiler uses what it deprecates
@pytest.mark.parametrize("name", varied())
def test_compiled_functions_say_the_same(name):
    torch._dynamo.reset()
    mask = varied()[name].resized(N)
    mod = mask.to_mask_mod()
    compiled = torch.compile(mod, backend="aot_eager", fullgraph=True)
    b, h = (torch.full((1, 1), size - 1) for size in (mask.num_rows, mask.num_heads))
    q = torch.arange(N)
    assert torch.equal(compiled(b, h, q[:, None], q[None]), mod(b, h, q[:, None], q[None]))


def test_tables_of_a_rank_keep_their_shapes_and_those_of_the_whole_are_small():
    def sizes(mod):
        return sorted(tuple(t.shape) for t in tensors(mod, set()))

    def tensors(value, seen):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, tuple | list):
            return [t for part in value for t in tensors(part, seen)]
        cells = getattr(value, "__closure__", None) or ()
        if id(value) in seen:
            return []
        seen.add(id(value))
        return [t for cell in cells for t in tensors(cell.cell_contents, seen)]

    rows = np.arange(12)
    one, two, three = (masks.documents(lengths) & masks.causal() for lengths in ([N], [5] * 4 + [4], [1] * N))
    made = [masks.per_row(*batch) for batch in ([one] * 3, [two, one, two], [one, two, three])]
    shapes = {str(sizes(to_mask_mod(mask.grid, Place(N, rows, None, "cpu", mask.num_rows)))) for mask in made}
    assert len(shapes) == 1, shapes
    whole = tensors((masks.documents([5, 19]) & masks.causal()).to_mask_mod(), set())
    assert sum(t.numel() for t in whole) == 2 * N + 1  # one span for each row, and the number of the plane


class Unknown:
    def allows(self, q, kv):
        return q >= kv

    def key(self):
        return "unknown"


def test_a_predicate_of_an_unknown_kind_is_refused():
    everywhere = masks.full(N).plane().sure
    plane = Plane(np.empty((0, 6), dtype=np.int64), everywhere, Unknown())
    with pytest.raises(MaskError, match=r"Unknown"):
        to_mask_mod(((plane,),), Place(N))
