"""The stand-ins' signatures are those of the real packages: their source, parsed and never imported.

pip fetches the oldest and the newest supported release of each package once per environment. Without a package index
these tests are skipped, and say so; a package that is there but has other signatures fails.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_fcp.runtime.kernels.flash_attn_2 import FlashAttention2
from megatron_fcp.runtime.kernels.flash_attn_3 import FlashAttention3
from megatron_fcp.runtime.kernels.flash_attn_4 import FlashAttention4
from megatron_fcp.runtime.kernels.transformer_engine import TransformerEngine
from megatron_fcp.testing.kernel_signatures import SIGNATURES
from megatron_fcp.testing.kernel_standins import parse_signature, signature_of

pytestmark = pytest.mark.runtime

CACHE = Path(sys.prefix) / "fcp-kernel-sources"
UNREACHABLE = ("no matching distribution", "could not find a version", "connection", "name resolution", "timed out")


@dataclass(frozen=True)
class Source:
    """Where a release's functions are written.

    Attributes
    ----------
    requirement : str
        What pip is asked for.
    path : str
        End of the file's path in the archive.
    """

    requirement: str
    path: str


INTERFACE = "flash_attn/flash_attn_interface.py"
CUTE = "flash_attn/cute/interface.py"
FUSED = "transformer_engine/pytorch/cpp_extensions/fused_attn.py"
SOURCES = {
    ("flash-attn", "2.7.0.post2"): Source("flash-attn==2.7.0.post2", INTERFACE),
    ("flash-attn", "2.8.3.post2"): Source("flash-attn==2.8.3.post2", INTERFACE),
    ("flash_attn_3", "3.0.0b1"): Source("flash-attn==2.8.3.post2", "hopper/flash_attn_interface.py"),
    ("flash-attn-4", "4.0.0b10"): Source("flash-attn-4==4.0.0b10", CUTE),
    ("flash-attn-4", "4.0.0b36"): Source("flash-attn-4==4.0.0b36", CUTE),
    ("transformer-engine", "2.9.0"): Source("transformer-engine==2.9.0", FUSED),
    ("transformer-engine", "2.20.2"): Source("transformer-engine==2.20.2", FUSED),
}


def archive(requirement: str) -> Path:
    """The release's archive in the cache; pip reads its metadata, which for flash-attn runs its set-up without CUDA."""
    folder = CACHE / requirement.replace("==", "-")
    found = sorted(folder.glob("*.whl")) + sorted(folder.glob("*.tar.gz"))
    if found:
        return found[0]
    name = requirement.split("==")[0]
    kind = ["--no-binary", name, "--no-build-isolation"] if name == "flash-attn" else ["--only-binary", name]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        *kind,
        "--dest",
        str(folder),
        requirement,
    ]
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    if done.returncode:
        if any(sign in done.stderr.lower() for sign in UNREACHABLE):
            pytest.skip(f"no package index gives {requirement}, so its signatures are not compared here")
        raise AssertionError(f"pip cannot fetch {requirement}:\n{done.stderr}")
    return next(p for p in folder.iterdir() if p.name.endswith((".whl", ".tar.gz")))


def read(source: Source) -> ast.Module:
    """Syntax tree of the file."""
    path = archive(source.requirement)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(source.path))
            return ast.parse(wheel.read(name))
    with tarfile.open(path) as sdist:
        (member,) = (m for m in sdist.getmembers() if m.name.partition("/")[2] == source.path)
        file = sdist.extractfile(member)
        assert file is not None
        return ast.parse(file.read())


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The only definition of a function."""
    (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found


def same(got: inspect.Signature, want: inspect.Signature) -> None:
    """Names, order, kinds and defaults agree."""
    assert [(p.name, p.kind, p.default) for p in got.parameters.values()] == [
        (p.name, p.kind, p.default) for p in want.parameters.values()
    ]


@pytest.mark.parametrize("release", SOURCES, ids=" ".join)
def test_signatures_are_those_of_the_source(release: tuple[str, str]) -> None:
    tree = read(SOURCES[release])
    for name, parameters in SIGNATURES[release]:
        same(signature_of(function(tree, name)), parse_signature(parameters))


@pytest.mark.parametrize("release", [r for r in SOURCES if r[0] == "transformer-engine"], ids=" ".join)
def test_transformer_engine_names_its_backend(release: tuple[str, str]) -> None:
    """``FusedAttnBackend["F16_arbitrary_seqlen"]`` exists, whether as a dictionary or as an enumeration."""
    for node in read(SOURCES[release]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FusedAttnBackend":
            assert isinstance(node.value, ast.Dict)
            assert "F16_arbitrary_seqlen" in [ast.literal_eval(k) for k in node.value.keys if k is not None]
            return
        if isinstance(node, ast.ClassDef) and node.name == "FusedAttnBackend":
            members = [ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)]
            assert "F16_arbitrary_seqlen" in members
            return
    raise AssertionError("no FusedAttnBackend")


@pytest.mark.parametrize("release", SOURCES, ids=" ".join)
def test_results_come_in_the_order_that_the_adapter_expects(release: tuple[str, str]) -> None:
    """Output first, then log-sum-exp; gradients as dq, dk, dv."""
    tree = read(SOURCES[release])
    forward, backward = (function(tree, name) for name, _ in SIGNATURES[release])
    returned = [n.value for n in ast.walk(forward) if isinstance(n, ast.Return) and n.value is not None]
    texts = [ast.unparse(value) for value in returned]
    if release[0] == "transformer-engine":
        assert "(output_tensors[0], output_tensors[1:])" in texts
    else:
        assert texts, "nothing is returned"
        for text in texts:
            assert text.startswith(("(out, softmax_lse", "(out, lse")), text
    if release[0] == "flash-attn-4":
        last = [ast.unparse(n) for n in backward.body if isinstance(n, ast.Return)]
        assert len(last) == 1
        assert last[0].startswith("return (dq, dk, dv)")


def test_every_release_is_covered() -> None:
    """Oldest and newest of each adapter have signatures, and all but the unreleased ones have a source."""
    for adapter in (FlashAttention2, FlashAttention3, FlashAttention4, TransformerEngine):
        for version in (adapter.oldest, adapter.newest):
            assert (adapter.distribution, version) in SIGNATURES
    assert set(SIGNATURES) - set(SOURCES) == {("flash_attn_3", "3.0.0")}  # on no index
