"""numba's ``njit`` with a type that keeps the signature of what it decorates, and compiled code that is never stale."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

    def njit(**_: Any) -> Callable[[F], F]: ...
else:
    from numba import njit

__all__ = ["drop_stale_caches", "njit"]

COMPILED = ("plan", "simulate")  # packages with compiled functions


def drop_stale_caches(package: Path) -> bool:
    """Forget compiled functions if any source file that they may come from has changed.

    numba renews a cached function when its own file changes, but not when one that it calls in another file does: the
    old code would then be called with the new layout of its arguments.

    Parameters
    ----------
    package : Path
        Folder of ``megatron_fcp``. Where it cannot be written to, numba keeps its cache elsewhere and nothing happens.

    Returns
    -------
    bool
        Whether caches were dropped.
    """
    sha = hashlib.sha256()
    for name in COMPILED:
        for source in sorted((package / name).glob("*.py")):
            sha.update(source.name.encode() + b"\0" + source.read_bytes())
    mark = package / COMPILED[0] / "__pycache__" / "compiled-from"
    with contextlib.suppress(OSError):
        if mark.is_file() and mark.read_text() == sha.hexdigest():
            return False
        for name in COMPILED:
            for index in (package / name / "__pycache__").glob("*.nbi"):
                index.unlink(missing_ok=True)
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(sha.hexdigest())
        return True
    return False


drop_stale_caches(Path(__file__).resolve().parents[1])
