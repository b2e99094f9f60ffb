"""Products of interpreted kernels, summed in one order.

The interpreter leaves `tl.dot` to numpy and so to BLAS. On some CPUs, BLAS sums a row's products in another order if
the row stands at another place of the tile, which no GPU does.
"""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted kernels add the products of each element one after the other, as they stand."""

    def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype or np.result_type(a, b))
        for at in range(a.shape[-1]):
            total += a[..., at : at + 1].astype(total.dtype) * b[..., at : at + 1, :].astype(total.dtype)
        return total

    monkeypatch.setattr(np, "matmul", product)
