"""Every kind of the bug book has a test, and the page about it links all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.plan

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "bugbook.md"
KINDS = range(1, 34)


def test_each_kind_has_a_file_and_a_row() -> None:
    files = {int(path.name[5:7]): path for path in sorted(FOLDER.glob("test_[0-9][0-9]_*.py"))}
    assert sorted(files) == list(KINDS)
    rows = re.findall(r"^\| (\d+)\. .+ \| \[(.+)\]\((.+)\) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(KINDS)
    for number, name, link in rows:
        assert (PAGE.parent / link).resolve() == files[int(number)]
        assert name == files[int(number)].stem


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_[0-9][0-9]_*.py")), ids=lambda path: path.stem)
def test_each_file_tests_and_says_why(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('"""'), "what goes wrong elsewhere comes first"
    assert re.search(r"^def test_", text, re.MULTILINE)
    if not path.stem.startswith("test_13"):  # seen while reading kernels
        assert re.search(r"https://github\.com/[\w./-]+/(issues|pull)/\d+", text)
