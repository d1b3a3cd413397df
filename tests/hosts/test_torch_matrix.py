"""docs/torch_matrix.md: its table has every cell of PyTorch's matrix, and Longspan is right in each, on two ranks."""

import re
from pathlib import Path

import pytest

from benchmarks import torch_matrix
from tests.pool import pool

PAGE = Path(__file__).parents[2] / "docs" / "torch_matrix.md"


@pytest.mark.timeout(300)
def test_every_cell_is_right():
    for rank, found in enumerate(pool(2).run(torch_matrix.all_by_longspan, timeout=280.0)):
        assert len(found) == 48
        for cell, error, said in found:
            assert error is not None, f"rank {rank}, {cell}: {said}"
            assert error <= torch_matrix.LIMIT, f"rank {rank}, {cell}: {error:.1e}"


def test_the_table_has_every_cell():
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| (context|wrapper|flex) ", line)
    ]
    assert all(row[-1] == "right" and row[-2] == "right" for row in rows)
    named = {(*row[:4], way) for row in rows for way in (False, True)}
    assert len(rows) == 24
    assert named == {(c.kind, c.mask, c.balancer, c.rotation, c.backward) for c in torch_matrix.cells()}
    assert not any("right" in row[5] for row in rows), "PyTorch runs no cell with backward on CPUs"
