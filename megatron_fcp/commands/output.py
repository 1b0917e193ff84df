"""Tables for people, JSON for programs, progress on stderr either way, and files that are whole or not there."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_fcp.files import check_place, write_whole

QUIET_S = 4.0  # without a word, before :func:`long_work` says what is going on


def print_json(value: Any) -> None:
    """Print ``value`` as JSON; what is not a finite number becomes null, which JSON has no other word for."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def check_output(flag: str, path: str | None, *, picture: bool = False) -> None:
    """Raise now for a file that could not be written after a long computation.

    Raises
    ------
    ValueError
        Naming the flag.
    """
    if path is None:
        return
    try:
        check_place(path)
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from error
    if picture:
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        suffix = Path(path).suffix[1:]
        if suffix and suffix.lower() not in known:
            raise ValueError(f"{flag} {path}: Format {suffix!r} is not supported; use one of {', '.join(known)}")


def write_output(flag: str, path: str, data: bytes | str) -> None:
    """Write a result, whole or not at all.

    Raises
    ------
    ValueError
        Naming the flag.
    """
    with naming(flag, path):
        write_whole(path, data)


@contextmanager
def naming(flag: str, path: str) -> Iterator[None]:
    """Say of an OSError on the way which flag it belongs to."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror or error}") from error


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str] | None]) -> None:
    """Print a table, its first column aligned to the left; None draws a line."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def note(text: str) -> None:
    """Tell something that is no result."""
    print(text, file=sys.stderr)


@contextmanager
def long_work(what: str, seconds: float, total: int) -> Iterator[Any]:
    """A bar on stderr, with an estimate before it, for what takes longer than a moment; else nothing.

    Yields what to call with a description after each of ``total`` steps. On a terminal, work that was estimated as
    short and takes long after all, as it does where numba compiles first, is named as well.
    """
    if seconds >= QUIET_S:
        note(f"{what}, about {seconds:.0f} s on one core")
        with progress(total, what) as step:
            yield step
        return
    text = f"{what} ... (the first run after an installation also compiles, for a minute or more)"
    timer = threading.Timer(QUIET_S, note, [text])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield lambda _: None
    finally:
        timer.cancel()


@contextmanager
def progress(total: int, what: str) -> Iterator[Any]:
    """A bar on stderr; call what it yields with a description to step on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"{what} {{task.description}}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def step(description: str, advance: int = 1) -> None:
            bar.update(task, description=description, advance=advance)

        yield step


def percent(share: float) -> str:
    """0.934 -> 93.4%."""
    return f"{share * 100:.1f}%"


def duration(seconds: float) -> str:
    """A time with a fitting unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
