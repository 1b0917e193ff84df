"""Runtime tests: ranks as threads for many small cases, real gloo processes for the rest."""

import pytest


@pytest.fixture(autouse=True)
def nan_everywhere(nan_memory: None) -> None:
    """Uninitialised memory is NaN in every test of the runtime."""
