"""What `check_same` says about batches that differ, key by key, without processes."""

import numpy as np
import pytest

from longspan.training.groups import NAME_BYTES, BatchError, DifferentBatchesError, _differences


def tables(*ranks):
    """Every rank's {key: content} as the int64 rows that travel."""
    most = max(len(keys) for keys in ranks)
    table = np.zeros((len(ranks), most, NAME_BYTES // 8 + 4), dtype=np.int64)
    for rows, keys in zip(table, ranks, strict=True):
        for row, (name, content) in zip(rows, sorted(keys.items()), strict=False):
            row[: NAME_BYTES // 8] = np.frombuffer(name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), dtype=np.int64)
            row[NAME_BYTES // 8 :] = content
    return table, [len(keys) for keys in ranks]


LONG = "model.layers.0." + "x" * NAME_BYTES


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{"a": 1}, {"a": 1}], []),
        ([{"a": 1}, {"a": 2}], ["'a' on ranks [1] is not what rank 0 has"]),
        ([{"a": 1, "b": 3}, {"a": 1}], ["'b' is missing on ranks [1]"]),
        # Names are cut at 64 bytes: of two that begin alike, a difference in the first must not be lost.
        ([{LONG + ".a": 1, LONG + ".b": 5}, {LONG + ".a": 2, LONG + ".b": 5}], [f"{LONG[:64]!r} on ranks [1] is not"]),
    ],
)
def test_differences_by_key(ranks, said):
    found = _differences(*tables(*ranks))
    assert len(found) == len(said)
    assert all(text.startswith(begin) for text, begin in zip(found, said, strict=True))


def test_the_error_has_its_differences_apart_from_its_words():
    error = DifferentBatchesError(2, ["'a' on ranks [1] is not what rank 0 has", "'b' is missing on ranks [1]"])
    assert isinstance(error, BatchError)
    assert error.differences == "'a' on ranks [1] is not what rank 0 has; 'b' is missing on ranks [1]"
    assert f"but {error.differences}. Make the data loader" in str(error)
