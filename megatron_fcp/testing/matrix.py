"""The matrix of features and layouts, made from the tests: a pytest plugin that writes ``docs/matrix.md``.

A test declares what it shows with a mark, beside its other marks or on one of its parameters::

    @pytest.mark.feature("Parallelism: TP 2 + SP")                  # layout: the test's parameter `layout`
    @pytest.mark.feature("Attention: {kind}", layout="reshuffle")   # {kind}: the test's parameter `kind`
    @pytest.mark.feature("Data: SFT", layout="both")
    pytest.param(..., marks=pytest.mark.feature("Experts: EP 2"))

The name is the row, headed by one of :data:`GROUPS`. A nightly test says how long it takes:
``pytest.mark.nightly(seconds=75)``. A test of a refusal adds ``refused=True``: the message comes from the entries of
:data:`megatron_fcp.integration.refusals.REFUSALS` with that ``feature``, or is given (``refused="message"``) where
something else refuses. What cannot be tried here says why: ``not_run="reason"``, on the test that shows the reason.

    python -m pytest --collect-only -q -p megatron_fcp.testing.matrix --matrix docs/matrix.md tests/integration
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_fcp.integration.refusals import REFUSALS

__all__ = ["GROUPS", "LAYOUTS", "TESTS", "Cell", "declarations", "problems", "render"]

GROUPS = (
    "Parallelism",
    "Attention",
    "Positions",
    "Experts",
    "Models",
    "Loss",
    "Schedule",
    "Optimizer",
    "Recomputation",
    "Precision",
    "Data",
    "Checkpoints",
    "Other flags",
)
_PLAIN = str.maketrans("|`", "/'")  # what a cell cannot hold
LAYOUTS = ("reshuffle", "resident")
TESTS = ("tests/integration", "tests/runtime", "tests/regress")  # where declarations are looked for

_HEAD = """\
# What works, by test
Written from the tests' own declarations by `make matrix`; `make test` fails where it is out of date, a cell is empty or
a refusal has no test. "Works" means: through Megatron's own training loop, losses and gradients as on one
context-parallel rank. One test is named per cell; *nightly* ones run in `make test-all`, with their time on 2 cores.
Everything runs on CPUs over gloo; nothing in this table has run on a GPU.
How a test declares its row: `megatron_fcp/testing/matrix.py`.
"""


@dataclass(frozen=True)
class Cell:
    """What one test says about one feature in one layout.

    Attributes
    ----------
    feature, layout : str
    test : str
        Its id, ``path::name[parameters]``.
    kind : {"works", "refused", "not run"}
    text : str
        Message or reason, where there is one.
    nightly : bool
    seconds : float, optional
        How long a nightly test takes.
    """

    feature: str
    layout: str
    test: str
    kind: str
    text: str = ""
    nightly: bool = False
    seconds: float | None = None


def declarations(items: Iterable[pytest.Item]) -> list[Cell]:
    """Every declaration of the collected tests, in their order.

    Raises
    ------
    ValueError
        For a declaration that names no known group, no layout, or an unknown one; names the test.
    """
    return [cell for item in items for mark in item.iter_markers("feature") for cell in _cells(item, mark)]


def _cells(item: pytest.Item, mark: pytest.Mark) -> Iterator[Cell]:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    layout = mark.kwargs.get("layout") or parameters.get("layout")
    layouts = LAYOUTS if layout == "both" else (str(layout),)
    if unknown := mark.kwargs.keys() - {"layout", "refused", "not_run"}:
        raise ValueError(f"{item.nodeid}: feature() knows no {sorted(unknown)}")
    if not set(layouts) <= set(LAYOUTS):
        raise ValueError(f"{item.nodeid}: feature() needs layout= reshuffle, resident or both, or such a parameter")
    refused, reason = mark.kwargs.get("refused"), mark.kwargs.get("not_run")
    nightly = item.get_closest_marker("nightly")
    for template in mark.args:
        feature = template.format_map(parameters)
        if feature.partition(": ")[0] not in GROUPS or ": " not in feature:
            raise ValueError(f"{item.nodeid}: feature {feature!r} begins with none of {', '.join(GROUPS)}")
        for one in layouts:
            text = reason or (refused if isinstance(refused, str) else _message(feature, one) if refused else "")
            yield Cell(
                feature=feature,
                layout=one,
                test=item.nodeid,
                kind="refused" if refused else "not run" if reason else "works",
                text=text,
                nightly=nightly is not None,
                seconds=nightly.kwargs.get("seconds") if nightly is not None else None,
            )


def _message(feature: str, layout: str) -> str:
    """What the refusals of a feature in a layout say, without the offending value."""
    said = [r.message(True) for r in REFUSALS if r.feature == feature and layout in r.layouts]
    return "; and ".join(said)


def problems(cells: Iterable[Cell]) -> list[str]:
    """What keeps the matrix from being whole: empty or contradictory cells, refusals without a test, missing times."""
    cells = list(cells)
    found: list[str] = []
    for feature in dict.fromkeys(cell.feature for cell in cells):
        for layout in LAYOUTS:
            kinds = {cell.kind for cell in cells if (cell.feature, cell.layout) == (feature, layout)}
            if len(kinds) != 1:
                found.append(f"{feature}, {layout}: {' and '.join(sorted(kinds)) or 'no test'}")
    found += [
        f"{cell.feature}, {cell.layout}: {cell.test} tells of a refusal that REFUSALS has not"
        for cell in cells
        if cell.kind == "refused" and not cell.text
    ]
    found += [f"{c.test}: nightly(seconds=...) is missing" for c in cells if c.nightly and c.seconds is None]
    tested = {(cell.feature, cell.layout) for cell in cells if cell.kind == "refused"}
    found += [
        f"{refusal.flag}: no test is marked feature({refusal.feature!r}, layout={layout!r}, refused=True)"
        for refusal in REFUSALS
        for layout in refusal.layouts
        if (refusal.feature, layout) not in tested
    ]
    return found


def render(cells: Iterable[Cell]) -> str:
    """The matrix in Markdown."""
    cells = list(cells)
    lines = [_HEAD]
    for group in GROUPS:
        features = dict.fromkeys(cell.feature for cell in cells if cell.feature.partition(": ")[0] == group)
        if not features:
            continue
        lines += [f"## {group}", "| | `reshuffle` | `resident` |", "|---|---|---|"]
        for feature in features:
            shown = [_show([c for c in cells if (c.feature, c.layout) == (feature, layout)]) for layout in LAYOUTS]
            if shown[0] == shown[1] and not shown[0].startswith("works"):
                shown[1] = shown[0].partition(":")[0] + ", as beside"
            lines.append(f"| {feature.partition(': ')[2]} | {shown[0]} | {shown[1]} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _show(cells: list[Cell]) -> str:
    """A cell: the kind, and the quickest test or the message."""
    first = min(cells, key=lambda cell: cell.nightly)  # min keeps the order of the tests
    path, _, name = first.test.partition("::")
    test = f"[`{name.translate(_PLAIN)}`](../{path})"
    when = f", nightly ({first.seconds:g} s)" if first.nightly and first.seconds is not None else ""
    if first.kind == "works":
        return f"works{when}: {test}"
    return f"{first.kind}: {first.text.replace('|', '/')} ({test})"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--matrix``."""
    parser.addoption("--matrix", metavar="FILE", help="write the matrix of features and layouts to FILE")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the matrix once all tests are known."""
    path = session.config.getoption("--matrix")
    if path is None:
        return
    try:
        cells = declarations(session.items)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if found := problems(cells):
        raise pytest.UsageError("\n".join(["the matrix is not whole:", *found]))
    Path(path).write_text(render(cells))
