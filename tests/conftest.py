"""Fixtures that several layers of tests share; nothing here imports torch before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fcp_runs import Runs

    from megatron_fcp.testing.loop import TrainingLoop


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--megatron PATH``, as often as needed: checkouts of Megatron-LM for tests/integration/test_releases.py."""
    parser.addoption(
        "--megatron",
        action="append",
        default=[],
        metavar="PATH",
        help="a checkout of Megatron-LM, of any release from 0.16 to main, whose own scripts are trained with",
    )


@pytest.fixture(scope="session")
def gloo() -> Iterator[object]:
    """Runs jobs on real processes over gloo (:class:`megatron_fcp.testing.gloo_pool.GlooPool`)."""
    pytest.importorskip("torch")
    from megatron_fcp.testing.gloo_pool import GlooPool

    with GlooPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def training_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingLoop]:
    """Runs Megatron's real training loop on the CPU platform: one server process, fresh ranks per run."""
    pytest.importorskip("torch")
    from megatron_fcp.testing.loop import TrainingLoop

    with TrainingLoop(tmp_path_factory.mktemp("initial")) as loop:
        yield loop


@pytest.fixture(scope="session")
def runs(training_loop: TrainingLoop) -> Runs:
    """Trains the tests' model with and without FCP, each run once per session."""
    from fcp_runs import Runs

    return Runs(training_loop)


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
