"""The training loop that integration tests share: one server process per session, fresh ranks per run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fcp_runs import Runs

from megatron_fcp.testing.loop import TrainingLoop


@pytest.fixture(scope="session")
def training_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingLoop]:
    """Runs Megatron's real training loop on the CPU platform; skips where Megatron is not installed."""
    pytest.importorskip("torch")
    with TrainingLoop(tmp_path_factory.mktemp("initial")) as loop:
        yield loop


@pytest.fixture(scope="session")
def runs(training_loop: TrainingLoop) -> Runs:
    """Trains the tests' model with and without FCP, each run once per session."""
    return Runs(training_loop)
