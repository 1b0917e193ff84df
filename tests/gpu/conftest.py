"""GPU tests: skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to work in deterministic mode without it
torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multigpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 GPUs with NCCL, found {count}; not yet run on GPUs"))
        elif item.get_closest_marker("gpu") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, found none; not yet run on a GPU"))


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory() -> Iterator[None]:
    """Poison: ``torch.empty`` gives NaN, so that a row that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
