"""Compiled functions are renewed when a file that they call into changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fcp.plan.jit import drop_stale_caches

pytestmark = pytest.mark.plan


def test_a_changed_callee_drops_the_caches_of_its_callers(tmp_path: Path) -> None:
    for name in ("plan", "simulate"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
    caller = tmp_path / "simulate" / "__pycache__" / "caller.f-1.py312.nbi"
    callee = tmp_path / "plan" / "callee.py"
    callee.write_text("one = 1\n")
    assert drop_stale_caches(tmp_path)
    caller.write_text("compiled")
    assert not drop_stale_caches(tmp_path)
    assert caller.exists()
    callee.write_text("one = 2\n")
    assert drop_stale_caches(tmp_path)
    assert not caller.exists()


def test_so_it_does_in_a_folder_of_the_user(tmp_path: Path) -> None:
    package, caches = tmp_path / "package", tmp_path / "caches"
    (package / "plan").mkdir(parents=True)
    callee = package / "plan" / "callee.py"
    callee.write_text("one = 1\n")
    assert drop_stale_caches(package, str(caches))
    caller = caches / "simulate_0123" / "caller.f-1.py312.nbi"
    caller.parent.mkdir()
    caller.write_text("compiled")
    assert not drop_stale_caches(package, str(caches))
    assert caller.exists()
    callee.write_text("one = 2\n")
    assert drop_stale_caches(package, str(caches))
    assert not caller.exists()
