"""docs/matrix.md is what the tests declare: up to date, without an empty cell, every refusal tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fcp.testing.matrix import GROUPS, LAYOUTS, TESTS, Cell, problems, render

pytestmark = pytest.mark.plan

ROOT = Path(__file__).resolve().parents[2]


def test_the_matrix_is_up_to_date_and_whole(tmp_path: Path) -> None:
    made = tmp_path / "matrix.md"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "megatron_fcp.testing.matrix"]
    found = subprocess.run([*command, "--matrix", made, *TESTS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert made.read_text() == (ROOT / "docs" / "matrix.md").read_text(), "run `make matrix`"


def cells(**changes: object) -> list[Cell]:
    """A whole matrix of one feature, its second cell changed."""
    feature = f"{GROUPS[0]}: one"
    first, second = (Cell(feature, layout, f"tests/t.py::test[{layout}]", "works") for layout in LAYOUTS)
    return [first, Cell(**{**vars(second), **changes})]


def of_rows(found: list[str]) -> list[str]:
    """Without the refusals of the package, which these cells do not test."""
    return [text for text in found if not text.startswith(("--", "RoPE"))]


def test_what_is_wrong_with_a_matrix() -> None:
    assert of_rows(problems(cells())) == []
    assert of_rows(problems(cells()[:1])) == ["Parallelism: one, resident: no test"]
    assert of_rows(problems([*cells(), *cells(kind="refused", text="why")])) == [
        "Parallelism: one, resident: refused and works"
    ]
    assert "tells of a refusal" in of_rows(problems(cells(kind="refused")))[0]
    assert "nightly(seconds=...)" in of_rows(problems(cells(nightly=True)))[0]
    assert any("--attention-dropout: no test" in text for text in problems(cells()))


def test_rows_show_test_time_and_message() -> None:
    text = render(cells(nightly=True, seconds=75.0))
    assert "| one | works: [`test[reshuffle]`](../tests/t.py) | works, nightly (75 s): " in text
    assert "refused: because (" in render(cells(kind="refused", text="because"))
