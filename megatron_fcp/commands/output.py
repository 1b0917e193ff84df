"""Tables for people, JSON for programs, progress on stderr either way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def print_json(value: Any) -> None:
    """Print ``value`` as JSON."""
    json.dump(value, sys.stdout, indent=2, default=float)
    print()


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
