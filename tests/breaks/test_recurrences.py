"""Attacks on recurrences and convolutions: masks as documents, numbers that are not finite, edges, random jobs."""

import numpy as np
import pytest
import torch

import longspan as ls
from longspan.masks import document_rows as document_rows_module
from longspan.masks.document_rows import document_rows
from longspan.training import shard_batch
from tests.lanes import NIGHTLY

masks = ls.masks

# -- masks as documents ------------------------------------------------------------------------------------------------


def documents_by_pairs(mask, total):
    """The document of each token, (rows, S), from the dense mask and by brute force; None if it is not of documents."""
    at = np.arange(total)
    rows = []
    for row in range(mask.num_rows):
        heads = []
        for head in range(mask.num_heads):
            sees = mask.resized(total).allows(*np.broadcast_arrays(at[:, None], at), row=row, head=head)
            starts = [t == 0 or not sees[t, t - 1] for t in range(total)]
            numbers = np.cumsum(starts) - 1
            same = numbers[:, None] == numbers
            if not sees.diagonal().all() or (sees & ~same).any():
                return None
            if not any(all(_has_prefix(sees, at[numbers == n], w) for n in set(numbers)) for w in range(total + 1)):
                return None
            heads.append(numbers)
        if any((heads[0] != other).any() for other in heads[1:]):
            return None
        rows.append(heads[0])
    return np.stack(rows)


def _has_prefix(sees, places, window):
    """Whether the past is a prefix and a window, for a prefix of some length."""
    square, local = sees[np.ix_(places, places)], np.arange(len(places))
    past, near = local[:, None] >= local, local[:, None] - local <= window
    return any((square[past] == (near | (local < prefix))[past]).all() for prefix in range(len(places) + 1))


def named_masks(total=40):
    documents, half = masks.documents, [total // 2, total - total // 2]
    other = [total // 4, total - total // 4]
    return {
        "full": masks.full(),
        "causal": masks.causal(),
        "not causal": ~masks.causal(),
        "chunked": masks.chunked(10, total),
        "prefix_lm": masks.prefix_lm(7),
        "global_prefix": masks.global_prefix(5),
        "window": masks.sliding_window(2),
        "window both ways": masks.sliding_window(2, 2),
        "window ahead": masks.sliding_window(0, 2),
        "documents | window": documents(half) | masks.sliding_window(3),
        "documents & causal & window": documents(half) & masks.causal() & masks.sliding_window(3),
        "not documents": ~documents(half),
        "documents & documents": documents(half) & documents(other),
        "documents | documents": documents(half) | documents(other),
        "documents per head": masks.per_head(documents(half), documents(other)),
        "windows per head": masks.per_head(documents(half) & masks.sliding_window(3), documents(half) & masks.causal()),
        "documents per row": masks.per_row(documents(half), documents(other)),
        "one row": masks.per_row(documents(half)),
        "documents & global_prefix": documents(half) & masks.global_prefix(5),
        "documents & (window | prefix)": documents(half) & (masks.sliding_window(3) | masks.global_prefix(5)),
        "nothing": ~masks.full(total),
        "documents & not causal": documents(half) & ~masks.causal(),
        "shared prefix": (documents(half) & masks.causal()) | masks.global_prefix(2),
    }


TAKEN = {
    *("full", "causal", "chunked", "prefix_lm", "window", "window both ways", "documents & causal & window"),
    *("documents & documents", "windows per head", "documents per row", "one row", "documents & (window | prefix)"),
}


@pytest.mark.parametrize("name", named_masks())
def test_masks_are_read_as_documents_or_refused_by_every_function(name):
    mask, total = named_masks()[name], 40
    x, weight = torch.randn(2, total, 3).double(), torch.randn(3, 4).double()
    layout = ls.layouts.zigzag(total, 2)
    sizes = {"heads": 1, "keys": 3, "values": 1, "maps": "elements", "batch": 2}
    batch = {"labels": torch.arange(total).expand(2, -1)}
    calls = {
        "linear_recurrence": lambda d: ls.linear_recurrence(x.sigmoid(), x, documents=d),
        "causal_conv1d": lambda d: ls.causal_conv1d(x, weight, documents=d),
        "scan_plan": lambda d: ls.scan_plan(d, layout, **sizes).fingerprint,
        "conv_plan": lambda d: ls.conv_plan(d, layout, channels=3, width=4, dtype="float64", batch=2).fingerprint,
        "shard_batch": lambda d: shard_batch(batch, layout, 0, documents=d, positions="document")["shift_labels"],
    }
    expected = documents_by_pairs(mask, total)
    assert (expected is not None) == (name in TAKEN)
    for function, call in calls.items():
        if expected is None:
            with pytest.raises(ls.LongspanError, match=r"must be lengths or a mask of documents.*but got <mask"):
                call(mask)
            continue
        lengths = [np.bincount(row).tolist() for row in expected]
        found, wanted = call(mask), call(lengths if len(lengths) > 1 else lengths[0])
        assert found == wanted if isinstance(found, str) else torch.equal(found, wanted), function


def random_mask(rng, total, depth=2):
    """Masks combined at random; about a third are masks of documents."""
    if rng.random() < 0.1:  # one pair is another than in a causal mask
        sees, (q, kv) = np.tri(total, dtype=bool), rng.integers(0, total, size=2)
        sees[q, kv] ^= True
        return masks.from_dense(torch.as_tensor(sees))
    kind = rng.integers(0, 9 if depth else 6)
    cuts = np.sort(rng.integers(0, total + 1, size=rng.integers(0, 3)))
    lengths = np.diff(np.concatenate(([0], cuts, [total])))
    sub = lambda: random_mask(rng, total, depth - 1)  # noqa: E731
    small = lambda: int(rng.integers(0, 5))  # noqa: E731
    make = (
        lambda: masks.documents(lengths),
        lambda: masks.documents(lengths) & masks.causal(),
        lambda: masks.sliding_window(small(), small() if rng.random() < 0.5 else 0),
        lambda: masks.causal() if rng.random() < 0.7 else masks.full(),
        lambda: masks.prefix_lm(lengths // 2, lengths),
        lambda: masks.global_prefix(small()),
        lambda: sub() & sub(),
        lambda: sub() | sub(),
        lambda: ~sub() if rng.random() < 0.4 else _varied(rng, [sub() for _ in range(2)]),
    )
    return make[kind]().resized(total)


def _varied(rng, options):
    if any(mask.num_heads > 1 or mask.num_rows > 1 for mask in options):
        return options[0]
    return masks.per_head(*options) if rng.random() < 0.5 else masks.per_row(*options)


def differences_from_pairs(seeds):
    """How many random masks are read as brute force reads them, how many both refuse, and those that differ."""
    read = refused = 0
    different = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        total = int(rng.integers(1, 13))
        mask = random_mask(rng, total)
        expected = documents_by_pairs(mask, total)
        try:
            found = document_rows(mask, total)
        except ls.MaskError:
            found = None
        if (found is None) != (expected is None) or (found is not None and not np.array_equal(found, expected)):
            different.append(seed)
        read, refused = read + (found is not None), refused + (found is None)
    return read, refused, different


def test_random_masks_are_read_as_brute_force_reads_their_pairs(tries):
    count = 20_000 if NIGHTLY else 1000
    read, refused, different = differences_from_pairs(range(count))
    assert not different
    assert min(read, refused) > count // 10
    tries("masks as documents", count, read, refused)


MUTANTS = {
    "distances are ignored": ("_counts_by_key", lambda real: lambda b, s, low, high=1 << 40: real(b, s, 0, high)),
    "only distances up to 2 are counted": (
        "_counts_by_key",
        lambda real: lambda b, s, low, high=2: real(b, s, low, min(high, 2)),
    ),
    "problems are dropped": ("_of_bands", lambda real: lambda b, s: (real(b, s)[0], None)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_reading_masks_are_noticed(name, monkeypatch):
    function, mutate = MUTANTS[name]
    monkeypatch.setattr(document_rows_module, function, mutate(getattr(document_rows_module, function)))
    assert differences_from_pairs(range(400))[2]
