"""Fixtures that several layers of tests share; nothing here imports torch before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def gloo() -> Iterator[object]:
    """Runs jobs on real processes over gloo (:class:`megatron_fcp.testing.gloo_pool.GlooPool`)."""
    pytest.importorskip("torch")
    from megatron_fcp.testing.gloo_pool import GlooPool

    with GlooPool() as pool:
        yield pool


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Let ``torch.empty`` give NaN (deterministic mode does), and use one core per rank."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
