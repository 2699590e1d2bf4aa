"""Transactions of known access patterns."""

import numpy as np
import pytest
from bench import KERNELS, Buffer, line_of

SOURCE = KERNELS / "accesses.cu"
X = np.zeros(256, np.float32)


@pytest.fixture(scope="module")
def rows(bench):
    launcher = bench.load(SOURCE).run_patterns
    rows = bench.trace(launcher, Buffer(X[:32], "y", "output"), Buffer(X, "x"))
    return {(row.line, row.kind): row for row in rows}


@pytest.mark.parametrize(
    "pattern, kind, moved, ideal",
    [
        ("coalesced", "global load", 4, 4),
        ("one element late", "global load", 5, 4),
        ("every other", "global load", 8, 4),
        ("broadcast", "global load", 1, 1),
        ("vectors", "global load", 16, 16),
        ("one row", "shared load", 1, 1),
        ("one column", "shared load", 32, 1),
        ("padded column", "shared load", 1, 1),
        ("two to a bank", "shared load", 2, 1),
        ("store", "global store", 4, 4),
    ],
)
def test_transactions_of_a_warp(rows, pattern, kind, moved, ideal):
    row = rows[f"accesses.cu:{line_of(SOURCE, '// ' + pattern)}", kind]
    assert (row.requests, row.moved, row.ideal) == (1, moved, ideal)


@pytest.mark.parametrize("padded, passes", [(0, 8), (1, 1)])
def test_rows_of_128_bytes_make_ldmatrix_conflict(bench, padded, passes):
    y = Buffer(np.empty(32, np.uint32), "y", "output")
    rows = bench.trace(bench.load(SOURCE).run_matrix_rows, padded, y, Buffer(X, "x"))
    (row,) = [row for row in rows if row.line == f"accesses.cu:{line_of(SOURCE, '// ldmatrix')}"]
    assert (row.kind, row.moved, row.ideal) == ("shared load", passes, 1)
