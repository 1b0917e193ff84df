"""Stands in for numba on a GPU machine that has PyTorch alone: decorated functions stay Python, slow but the same.

Only ``benchmarks/gpu_all.sh`` puts this folder on the path, and only where numba is missing.
"""

from collections.abc import Callable
from typing import Any


def njit(*args: Any, **_: Any) -> Any:
    """``numba.njit`` as the identity, with or without arguments."""
    if args and callable(args[0]):
        return args[0]

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    return keep
