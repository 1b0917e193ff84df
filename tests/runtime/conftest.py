"""Runtime tests: ranks as threads for many small cases, real gloo processes for the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory() -> Iterator[None]:
    """Let ``torch.empty`` give NaN (deterministic mode does), and use one core per rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def gloo() -> Iterator[object]:
    """Runs jobs on real processes over gloo."""
    from megatron_fcp.testing.gloo_pool import GlooPool

    with GlooPool() as pool:
        yield pool
