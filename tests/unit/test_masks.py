"""Masks against brute force: random compositions, closed forms, identity, messages."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan import masks
from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.tiles import tile_pairs
from longspan.spans import Span
from tests.lanes import NIGHTLY

NUM_COMPOSITIONS = 5000 if NIGHTLY else 400


def lengths_of(total):
    """Document lengths, zeros included, that add up to `total`."""
    return st.lists(st.integers(0, total), max_size=5).map(
        lambda cuts: np.diff(np.sort(np.array([0, *cuts, total], dtype=np.int64)))
    )


def documents(total):
    def build(lengths):
        ids = np.repeat(np.arange(len(lengths)), lengths)
        return masks.documents(lengths), lambda q, k: ids[q] == ids[k]

    return lengths_of(total).map(build)


def prefix_documents(total):
    def build(pair):
        lengths, share = pair
        prefix = lengths * share // 4
        ids = np.repeat(np.arange(len(lengths)), lengths)
        end = np.repeat(np.cumsum(lengths) - lengths + prefix, lengths)
        return masks.prefix_lm(prefix, lengths), lambda q, k: (ids[q] == ids[k]) & ((k < end[q]) | (k <= q))

    return st.tuples(lengths_of(total), st.integers(0, 4)).map(build)


def leaves(total):
    """(mask, independent formula) pairs."""
    size = st.integers(0, total + 1)
    return st.one_of(
        st.just((masks.full(), lambda q, k: np.ones(np.broadcast_shapes(q.shape, k.shape), bool))),
        st.just((masks.causal(), lambda q, k: k <= q)),
        st.tuples(size, size).map(lambda w: (masks.sliding_window(*w), lambda q, k: (k >= q - w[0]) & (k <= q + w[1]))),
        documents(total),
        size.filter(bool).map(lambda n: (masks.chunked(n, total), lambda q, k: q // n == k // n)),
        st.integers(0, total).map(
            lambda n: (masks.prefix_lm(n, seq_len=total), lambda q, k: (k <= q) | ((q < n) & (k < n)))
        ),
        prefix_documents(total),
        size.map(lambda n: (masks.global_prefix(n), lambda q, k: (k < n) & (q >= 0))),
    )


def compositions(total):
    def join(children):
        pair = st.tuples(children, children)
        return st.one_of(
            pair.map(lambda p: (p[0][0] & p[1][0], lambda q, k: p[0][1](q, k) & p[1][1](q, k))),
            pair.map(lambda p: (p[0][0] | p[1][0], lambda q, k: p[0][1](q, k) | p[1][1](q, k))),
            children.map(lambda p: (~p[0], lambda q, k: ~p[1](q, k))),
        )

    return st.recursive(leaves(total), join, max_leaves=6)


cases = st.integers(1, 24).flatmap(lambda total: st.tuples(st.just(total), compositions(total), compositions(total)))
checked = settings(
    max_examples=NUM_COMPOSITIONS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def truth(formula, total):
    position = np.arange(total)
    return np.broadcast_to(formula(position[:, None], position[None, :]), (total, total))


def picture(bands, total):
    """Pairs counted band by band, the definition written out."""
    q, k = np.arange(total)[:, None], np.arange(total)[None, :]
    count = np.zeros((total, total), dtype=int)
    for b in bands:
        inside = (q >= b.q.start) & (q < b.q.stop) & (k >= b.kv.start) & (k < b.kv.stop)
        inside &= (True if b.lo is None else q - k >= b.lo) & (True if b.hi is None else q - k <= b.hi)
        count += inside
    return count


@checked
@given(cases)
def test_compositions_equal_brute_force(case):
    total, (mask, formula), (other, other_formula) = case
    mask, other = mask.resized(total), other.resized(total)
    expected = truth(formula, total)
    position = np.arange(total)
    assert np.array_equal(mask.allows(position[:, None], position[None, :]), expected)
    assert np.array_equal(picture(mask.bands(), total), expected.astype(int))  # disjoint: no pair counted twice
    assert mask.area() == expected.sum()
    same = np.array_equal(expected, truth(other_formula, total))
    assert (mask == other) == same
    if same:
        assert hash(mask) == hash(other)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(cases, st.lists(st.integers(0, 24), min_size=4, max_size=4))
def test_cut_and_tighten_equal_brute_force(case, corners):
    total, (mask, formula), _ = case
    q0, q1 = sorted(min(c, total) for c in corners[:2])
    k0, k1 = sorted(min(c, total) for c in corners[2:])
    plane = mask.resized(total).plane()
    expected = np.zeros((total, total), dtype=int)
    expected[q0:q1, k0:k1] = truth(formula, total)[q0:q1, k0:k1]
    tight = bd.tighten(bd.cut(plane.sure, (q0, q1), (k0, k1)))
    assert np.array_equal(picture(bd.as_bands(tight), total), expected)
    for row in tight:  # every query and key that a tightened band names is really used
        alone = picture(bd.as_bands(row[None]), total)
        assert alone[row[bd.Q0] : row[bd.Q1]].any(axis=1).all()
        assert alone[:, row[bd.K0] : row[bd.K1]].any(axis=0).all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases)
def test_opaque_parts_mix_with_closed_form(case):
    total, (mask, formula), (other, other_formula) = case
    opaque = masks.from_mask_mod(lambda b, h, q, k: (q * 7 + k * 3) % 5 < 3, total)
    mixed = (mask & opaque) | ~(other & ~opaque)
    position = np.arange(total)
    q, k = position[:, None], position[None, :]
    secret = (q * 7 + k * 3) % 5 < 3
    expected = (truth(formula, total) & secret) | ~(truth(other_formula, total) & ~secret)
    assert np.array_equal(mixed.allows(q, k), expected)


def test_empty_sequences_and_masks():
    assert masks.causal(0).area() == 0
    assert masks.documents([]).bands() == ()
    nothing = masks.causal(4) & ~masks.causal(4)
    assert nothing.area() == 0
    assert nothing.bands() == ()
    assert not nothing.allows([0, 3], [0, 1]).any()
    assert masks.full(1).area() == 1
    assert (nothing | masks.causal(4)) == masks.causal(4)


def test_area_of_long_sequences_is_exact():
    total = 100_000_000
    assert masks.causal(total).area() == total * (total + 1) // 2
    lengths = np.full(10_000, total // 10_000)
    assert (masks.documents(lengths) & masks.causal()).area() == 10_000 * (10_000 * 10_001 // 2)


def test_text_form_of_bands_parses_back():
    mask = (masks.sliding_window(3, 1) | masks.global_prefix(2)) & masks.documents([5, 9])
    for band in mask.bands():
        assert masks.Band.parse(repr(band)) == band


def test_equal_masks_share_fingerprints_and_differences_show():
    a, b = (masks.documents([4, 4]) & masks.causal() for _ in range(2))
    assert a.fingerprint == b.fingerprint
    assert a.fingerprint != (masks.documents([5, 3]) & masks.causal()).fingerprint
    torch = pytest.importorskip("torch")
    table = torch.arange(8) // 4
    one = masks.from_mask_mod(lambda b, h, q, k: q % 4 >= k % 4, 8)
    two = masks.from_mask_mod(lambda b, h, q, k: q % 3 >= k % 3, 8)
    assert one.fingerprint != two.fingerprint

    def same_code(ids):
        return masks.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k], 8)

    assert same_code(table).fingerprint == same_code(table.clone()).fingerprint
    assert same_code(table).fingerprint != same_code(torch.arange(8) // 2).fingerprint


def test_per_head_and_per_row_keep_their_planes_apart():
    heads = masks.per_head(masks.causal(), masks.sliding_window(1), masks.causal())
    assert heads.num_heads == 3
    assert len(heads.distinct_planes()) == 2  # equal planes are one
    both = heads & masks.per_row(masks.documents([3, 3]), masks.documents([6]))
    assert (both.num_rows, both.num_heads, both.seq_len) == (2, 3, 6)
    assert not both.allows(4, 1, row=0, head=0)
    assert both.allows(4, 1, row=1, head=0)
    assert not both.allows(4, 1, row=1, head=1)
    assert (~both).allows(4, 1, row=0, head=0)


def test_classifier_asks_only_where_asked_and_remembers():
    asked = []

    def mask_mod(b, h, q, k):
        asked.append(q)
        return q >= k

    classifier = masks.Classifier(masks.from_mask_mod(mask_mod, 1000).plane(), 1000, tile=128)
    found = classifier.classify(Span(256, 384), Span(0, 1000))
    assert found.tolist() == [[2, 2, 1, 0, 0, 0, 0, 0]]
    before = len(asked)
    assert np.array_equal(classifier.classify(Span(256, 384), Span(0, 1000)), found)
    assert len(asked) == before


def test_classifier_never_asks_outside_the_region():
    mask = masks.from_mask_mod(lambda b, h, q, k: q >= k, within=masks.documents([512, 512]))
    classifier = masks.Classifier(mask.plane(), 1024, tile=128)
    assert classifier.classify(Span(512, 640), Span(0, 1024)).tolist() == [[0, 0, 0, 0, 1, 0, 0, 0]]


def test_to_mask_mod_gives_the_same_pairs():
    torch = pytest.importorskip("torch")
    opaque = masks.from_mask_mod(lambda b, h, q, k: (q + k) % 3 != 1, 12)
    rows = masks.per_row(masks.documents([5, 7]), masks.documents([12]))
    heads = masks.per_head(masks.causal(), masks.sliding_window(2, 1) | masks.global_prefix(1))
    mask = rows & heads & (opaque | masks.chunked(4, 12))
    mod = mask.to_mask_mod()
    position = torch.arange(12)
    for row in range(2):
        for head in range(2):
            found = mod(torch.tensor(row), torch.tensor(head), position[:, None], position[None, :])
            expected = mask.allows(np.arange(12)[:, None], np.arange(12)[None, :], row=row, head=head)
            assert np.array_equal(found.numpy(), expected)


def test_to_mask_mod_builds_a_block_mask():
    pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask

    mask = masks.documents([200, 312]) & masks.causal()
    block = create_block_mask(mask.to_mask_mod(), 1, 1, 512, 512, device="cpu")
    assert block.kv_num_blocks.sum() + block.full_kv_num_blocks.sum() == 10 - 2 + 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bool(masks.causal()), "no truth value"),
        (lambda: masks.causal() and masks.full(), "write &, | and ~"),
        (lambda: masks.causal().area(), "Pass seq_len="),
        (lambda: masks.documents([3, -1]), "document 1 has length -1"),
        (lambda: masks.documents([[3]]), "flat list"),
        (lambda: masks.documents([3.5]), "whole numbers"),
        (lambda: masks.from_cu_seqlens([3, 4]), "starts with 0"),
        (lambda: masks.from_cu_seqlens([0, 4, 3]), "document 1 has length -1"),
        (lambda: masks.documents([3]) & masks.documents([4]), "same length"),
        (lambda: masks.documents([3]).resized(4), "is for 3 tokens"),
        (lambda: masks.sliding_window(-1), "left must be an integer, at least 0"),
        (lambda: masks.chunked(0, 4), "size must be an integer, at least 1"),
        (lambda: masks.prefix_lm(5, seq_len=4), "0 <= prefix <= length"),
        (lambda: masks.global_prefix(-1), "at least 0"),
        (lambda: masks.causal() & (lambda b, h, q, k: q > k), "from_mask_mod"),
        (lambda: masks.from_mask_mod("causal"), "takes a function"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: q - k).allows(1, 0), "must return one boolean tensor"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: h % 2 == 0).allows(1, 0), "uses h"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: (q > k) & (b == 0)).allows([1], [0]), "uses b"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: q >= k, 8).area(), "no closed form"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: q >= k, 8).bands(), "not a list of bands"),
        (lambda: masks.per_head(), "at least one"),
        (lambda: masks.per_head(masks.documents([3]), masks.documents([4])), "one sequence length"),
        (lambda: masks.per_head(masks.causal(), masks.full()) & masks.per_head(*[masks.full()] * 3), "2 heads"),
        (
            lambda: masks.per_head(masks.causal(), masks.full()).allows(0, 0, head=2),
            "head of <mask per_head.*but got 2",
        ),
        (lambda: masks.Band.parse("0:4y1:2"), "written start:stop"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: q >= k).draw(5000), "more than 4096"),
    ],
)
def test_messages(call, words):
    if words is None:
        call()
        return
    with pytest.raises(Exception, match=words.replace("|", r"\|").replace("(", r"\(")) as caught:
        call()
    assert isinstance(caught.value, (MaskError, masks.Band.parse("0:1x0:1").__class__)) or "Longspan" in str(
        type(caught.value).__mro__
    )


def test_drawing_is_readable():
    mask = (masks.documents([6, 10]) & masks.causal()) | masks.global_prefix(2)
    assert mask.draw(width=8).splitlines() == [
        "█·······",
        "█▒······",
        "██▒·····",
        "█··▒····",
        "█··█▒···",
        "█··██▒··",
        "█··███▒·",
        "█··████▒",
    ]


def test_to_mask_mod_keeps_the_row_a_function_was_made_for():
    torch = pytest.importorskip("torch")
    one = masks.from_mask_mod(lambda b, h, q, k: q >= k + b, 6, rows=1)
    mask = masks.per_row(masks.full(6), masks.full(6), one)  # used in row 2, made for row 0
    position = torch.arange(6)
    found = mask.to_mask_mod()(torch.tensor(2), torch.tensor(0), position[:, None], position[None, :])
    assert np.array_equal(found.numpy(), np.tri(6, dtype=bool))
    assert one.allows(3, 3).tolist() is True


def test_functions_mean_on_tiles_what_they_mean_on_pairs():
    torch = pytest.importorskip("torch")
    starts = torch.tensor([0, 4, 9])
    mixing = masks.from_mask_mod(lambda b, h, q, k: (q >= starts).sum() == (k >= starts).sum(), 12)
    plain = masks.documents([4, 5, 3])
    position = np.arange(12)
    assert np.array_equal(
        mixing.allows(position[:, None], position[None, :]), plain.allows(position[:, None], position[None, :])
    )
    assert mixing.allows(5, 8).tolist() is True


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]])
def test_masks_of_no_tokens_have_an_algebra_too(lengths):
    """Found by the fuzzer: taking one empty domain from another met numpy's maximum of nothing."""
    mask = masks.documents(lengths)
    for found in (~mask, ~~mask, mask & ~mask, mask | ~mask):
        assert found.area() == 0
        assert not found.allows([], []).any()


@pytest.mark.parametrize("mask", [masks.causal(8), masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 8)])
def test_tiles_without_rows_or_keys_have_no_pairs(mask):
    counts = tile_pairs(mask.plane(), np.array([0, 4, 4, 8]), np.array([0, 0, 5, 8, 8]))
    assert counts.tolist() == [[0, 10, 0, 0], [0, 0, 0, 0], [0, 20, 6, 0]]
