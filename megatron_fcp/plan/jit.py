"""numba's ``njit`` with a type that keeps the signature of what it decorates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

    def njit(**_: Any) -> Callable[[F], F]: ...
else:
    from numba import njit

__all__ = ["njit"]
