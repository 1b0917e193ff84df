"""Files that are whole or not there at all."""

from __future__ import annotations

import errno
import io
import os
import secrets
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file (text as UTF-8) beside its place and move it there, so that no reader ever sees half of it.

    Raises
    ------
    OSError
        If it cannot be written; nothing is left behind, and a file that was there stays as it was.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced
        target.write_bytes(content)
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that :func:`write_whole` would raise for a folder that is missing or closed, or a folder."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if target.exists() and not target.is_file():
        return
    folder = target.parent
    if not folder.is_dir():
        problem = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise OSError(problem, os.strerror(problem), os.fspath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def write_figure(figure: Any, path: str | os.PathLike[str], *, dpi: int = 110) -> None:
    """Write a matplotlib figure, in the format that the file's name ends in (PNG without one).

    Raises
    ------
    ValueError
        For a format that matplotlib does not have.
    OSError
        As :func:`write_whole`.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix[1:].lower() or "png", dpi=dpi)
    write_whole(path, buffer.getvalue())
