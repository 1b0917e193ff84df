"""Source patches: in and out without a trace, never half, and the flag works without launcher or register()."""

from __future__ import annotations

import importlib.util
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fcp_runs import Runs, fcp

from megatron_fcp.testing.loop import PRETRAIN_SCRIPT, TrainingJob, TrainingLoop, compare, tiny_model_args

PATCHES = Path(__file__).resolve().parents[2] / "patches"
RELEASES = {"0.16": "0.16", "0.17": "0.17", "0.18": "0.18", "0.19": "0.19", "main": "0.20"}  # folder: release

ARGUMENTS = '''"""Arguments."""
import argparse


def add_megatron_arguments(parser: argparse.ArgumentParser):
    """Adds."""
    parser = other(parser)

    return parser


def parse_args(extra=None):
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
'''


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("patches_apply", PATCHES / "apply.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


apply: Any = _load()


def make_megatron(root: Path, release: str = "0.19", text: str | bytes = ARGUMENTS) -> Path:
    """A Megatron of three files; returns its arguments file."""
    for folder in ("core", "training"):
        (root / "megatron" / folder).mkdir(parents=True)
    major, minor = release.split(".")
    (root / "megatron/core/package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\n")
    path = root / "megatron/training/arguments.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_release_has_a_patch_of_its_own_lines() -> None:
    folders = {path.parent.name for path in PATCHES.glob("*/patch.toml")}
    assert folders == set(RELEASES)
    patches = apply.read_patches()
    assert set(patches) == set(RELEASES.values())
    assert all("fcp" in line for patch in patches.values() for line in patch.lines)


@pytest.mark.parametrize("release", RELEASES.values())
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_in_and_out_without_a_trace(tmp_path: Path, release: str, ending: str) -> None:
    original = ARGUMENTS.replace("\n", ending).encode()
    path = make_megatron(tmp_path, release, original)
    path.chmod(0o640)
    assert apply.run("check", tmp_path)[0] is False
    assert apply.run("apply", tmp_path)[0] is True
    patched = path.read_bytes()
    assert patched.count(b"# megatron-fcp" + ending.encode()) == 2
    assert patched.index(b"_add_fcp_arguments(parser)") < patched.index(b"    return parser")
    assert apply.run("apply", tmp_path)[0] is True
    assert path.read_bytes() == patched, "twice is once"
    assert apply.run("check", tmp_path)[0] is True
    assert apply.run("remove", tmp_path)[0] is False
    assert apply.run("remove", tmp_path)[0] is False
    assert path.read_bytes() == original
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in path.parent.iterdir()] == ["arguments.py"]


OTHERS = {
    "other parameters": ("parser: argparse.ArgumentParser", "parser, more", "(parser, more) should take (parser)"),
    "no return": ("    return parser\n", "", "does not end with 'return parser'"),
    "another name": ("def add_megatron_arguments", "def add_all_arguments", "add_megatron_arguments() 0 times"),
    "no Python": ("def parse_args(", "def parse_args((", "does not parse"),
    "return behind a semicolon": ("\n\n    return parser", "; return parser", "shares its line"),
    "lines of others": (
        "    return parser\n",
        "    x = 1  # megatron-fcp\n    return parser\n",
        "not those of this patch",
    ),
}


@pytest.mark.parametrize("action", ["apply", "check", "remove"])
@pytest.mark.parametrize("change", OTHERS)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, change: str, action: str) -> None:
    old, new, words = OTHERS[change]
    assert old in ARGUMENTS
    path = make_megatron(tmp_path, text=ARGUMENTS.replace(old, new))
    before = path.read_bytes()
    if action == "apply" or change == "lines of others":
        with pytest.raises(apply.PatchError) as caught:
            apply.run(action, tmp_path)
        assert words in str(caught.value)
    else:
        assert apply.run(action, tmp_path)[0] is False
    assert path.read_bytes() == before


def test_edited_patches_are_refused(tmp_path: Path) -> None:
    path = make_megatron(tmp_path)
    apply.run("apply", tmp_path)
    edited = path.read_bytes().replace(b"_add_fcp_arguments(parser)", b"_add_fcp_arguments(parser, 1)")
    path.write_bytes(edited)
    for action in ("apply", "check", "remove"):
        with pytest.raises(apply.PatchError, match="by hand"):
            apply.run(action, tmp_path)
    assert path.read_bytes() == edited


def test_unknown_releases_are_refused(tmp_path: Path) -> None:
    path = make_megatron(tmp_path, "0.99")
    with pytest.raises(apply.PatchError, match=r"megatron-core 0\.99, and there are patches for 0\.16, 0\.17"):
        apply.run("apply", tmp_path)
    assert path.read_text() == ARGUMENTS
    with pytest.raises(apply.PatchError, match="is no Megatron-LM"):
        apply.run("apply", tmp_path / "megatron")


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_failure_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    path = make_megatron(tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(apply.os, "fsync" if fails == "write" else "replace", full)
    with pytest.raises(apply.PatchError, match="No space left"):
        apply.run("apply", tmp_path)
    assert path.read_text() == ARGUMENTS
    assert [p.name for p in path.parent.iterdir()] == ["arguments.py"]


def test_command_line(tmp_path: Path) -> None:
    make_megatron(tmp_path)

    def command(*argv: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-S", str(PATCHES / "apply.py"), *argv], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    assert command("check", str(tmp_path))[0] == 1
    code, text = command("apply", str(tmp_path))
    assert (code, "added 2 lines (megatron-core 0.19)" in text) == (0, True)
    assert command("check", str(tmp_path))[0] == 0
    assert command("remove", str(tmp_path))[0] == 0
    code, text = command("apply", str(tmp_path / "nowhere"))
    assert (code, "cannot be read" in text) == (2, True)
    assert command("undo", str(tmp_path))[0] == 2


@pytest.mark.megatron
def test_patched_megatron_trains_without_launcher(runs: Runs, tmp_path: Path) -> None:
    """A copy of the installed Megatron, patched; its script says nothing of FCP. Same bits as through register()."""
    import megatron.core

    installed = Path(megatron.core.__path__[0]).parent
    shutil.copytree(installed, tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    assert apply.run("apply", tmp_path)[0] is True
    lines = PRETRAIN_SCRIPT.read_text().splitlines(keepends=True)
    plain = [line for line in lines if "megatron_fcp" not in line]
    assert len(plain) < len(lines)
    script = tmp_path / "pretrain.py"
    script.write_text("".join(plain))

    flags = {"mock_data": None, "data_path": runs.loop.corpus().prefix, **fcp("resident"), "train_iters": 2}
    argv = tiny_model_args(**flags, pretrained_checkpoint=runs.loop.initial_checkpoint())
    with TrainingLoop(tmp_path / "own", tmp_path) as loop:
        result = loop.run(TrainingJob(argv, 2, str(script), gradients=True))
    assert "FCP: resident layout" in result.ranks[0].log
    difference = compare(result, runs(2, **fcp("resident"), train_iters=2))
    assert difference.loss == 0
    assert difference.gradient == 0
    assert len(result.losses) == 2
