"""One file per kind of failure that packed, variable-length context parallelism has shown elsewhere."""

import pytest


@pytest.fixture(autouse=True)
def nan_everywhere(request: pytest.FixtureRequest) -> None:
    """Uninitialised memory is NaN in tests of the runtime."""
    if request.node.get_closest_marker("runtime"):
        request.getfixturevalue("nan_memory")
