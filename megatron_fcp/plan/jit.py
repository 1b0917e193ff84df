"""numba's ``njit`` with a type that keeps the signature of what it decorates, and compiled code that is never stale."""

from __future__ import annotations

import contextlib
import hashlib
import os
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


def drop_stale_caches(package: Path, cache_dir: str = "") -> bool:
    """Forget compiled functions if any source file that they may come from has changed.

    numba renews a cached function when its own file changes, but not when one that it calls in another file does: the
    old code would then be called with the new layout of its arguments.

    Parameters
    ----------
    package : Path
        Folder of ``megatron_fcp``. Where it cannot be written to, numba keeps its cache elsewhere and nothing happens.
    cache_dir : str
        Value of ``NUMBA_CACHE_DIR``: numba keeps one folder per source folder there, named after it and its path.

    Returns
    -------
    bool
        Whether caches were dropped.
    """
    sha = hashlib.sha256()
    for name in COMPILED:
        for source in sorted((package / name).glob("*.py")):
            sha.update(source.name.encode() + b"\0" + source.read_bytes())
    if cache_dir:
        here = hashlib.sha256(str(package).encode()).hexdigest()[:16]
        mark = Path(cache_dir) / f"megatron_fcp-{here}-compiled-from"
        folders = [folder for name in COMPILED for folder in Path(cache_dir).glob(f"{name}_*")]
    else:
        mark = package / COMPILED[0] / "__pycache__" / "compiled-from"
        folders = [package / name / "__pycache__" for name in COMPILED]
    with contextlib.suppress(OSError):
        if mark.is_file() and mark.read_text() == sha.hexdigest():
            return False
        for folder in folders:
            for index in folder.glob("*.nbi"):
                index.unlink(missing_ok=True)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(sha.hexdigest())
        return True
    return False


drop_stale_caches(Path(__file__).resolve().parents[1], os.environ.get("NUMBA_CACHE_DIR", ""))
