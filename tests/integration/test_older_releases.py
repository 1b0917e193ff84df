"""What FCP does by itself on megatron-core 0.16 to 0.18, as far as the installed release can show it."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.megatron

ABILITIES = (
    *("hands_on_boundaries", "hands_on_packed_samples", "builds_packed_params_everywhere"),
    "builds_hybrid_stacks",
)
NEWER = dict.fromkeys(ABILITIES, True)
OLDER = {
    "0.18": {**NEWER, "hands_on_boundaries": False},
    "0.17": {**dict.fromkeys(ABILITIES, False), "builds_packed_params_everywhere": True},
    "0.16": dict.fromkeys(NEWER, False),
}
NOTHING = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "tensor_model_parallel_size": 1,
    "reset_attention_mask": False,
    "sft": False,
    "micro_batch_size": 2,
}
MIDDLE = {"reset_attention_mask": True, "pipeline_model_parallel_size": 3}
VIRTUAL = {"reset_attention_mask": True, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def refusals_of(case: tuple[str, dict[str, Any]]) -> list[str]:
    """Runs in a rank: what a release that can do as little as ``case`` says refuses."""
    from megatron_fcp.integration import features

    release, flags = case
    for name, value in OLDER.get(release, NEWER).items():
        setattr(features, name, lambda value=value: value)
    features.version = lambda: (release, f"{release}.0")
    args = Namespace(**{**NOTHING, **flags})
    features.complete(args)
    assert args.eval_micro_batch_size == 2
    assert args.dataloader_inter_document_masking is False
    return list(features.refused(args))


@pytest.mark.parametrize(
    ("release", "flags", "words"),
    [
        ("0.18", MIDDLE, ("--pipeline-model-parallel-size 3", "--reset-attention-mask", "0.18", "two stages")),
        ("0.17", VIRTUAL, ("virtual pipeline stages", "--reset-attention-mask", "0.17", "megatron-core 0.19")),
        ("0.18", {"fcp_plan_ahead": 2}, ("--fcp-plan-ahead 2", "0.19", "drop it")),
        ("0.17", {"sft": True, "tensor_model_parallel_size": 2}, ("--tensor-model-parallel-size 2", "--sft", "0.18")),
        (
            "0.16",
            {"hybrid_override_pattern": "M*"},
            ("--hybrid-override-pattern M*", "use --context-parallel"),
        ),
        ("0.17", {"hybrid_layer_pattern": "M*"}, ("--hybrid-layer-pattern M*", "0.17", "megatron-core 0.18 or newer")),
        ("0.20", {"mtp_hsm": True}, ("--mtp-hsm", "0.20", "leave it off")),
        ("0.16", {"sft": True}, ("--sft", "0.16", "megatron-core 0.17 or newer")),
    ],
)
def test_refusals(training_loop: TrainingLoop, release: str, flags: dict[str, Any], words: tuple[str, ...]) -> None:
    (message,) = training_loop.call("test_older_releases:refusals_of", (release, flags))
    for word in words:
        assert word in message


@pytest.mark.parametrize("release", ["0.19", *OLDER])
def test_what_works_is_not_refused(training_loop: TrainingLoop, release: str) -> None:
    flags = {"reset_attention_mask": True, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    assert training_loop.call("test_older_releases:refusals_of", (release, flags)) == []


def boundaries_of(tokens: list[list[int]]) -> tuple[list[int], list[int], int]:
    """Runs in a rank: document offsets of a batch, as the newest release gets them and as older ones do."""
    import torch
    from megatron.core import parallel_state
    from megatron.training import global_vars

    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration import batch, batch_older, session
    from megatron_fcp.integration.layouts import Boundaries
    from megatron_fcp.integration.settings import Settings

    rows = torch.tensor(tokens)
    num_samples, seq_length = rows.shape
    global_vars.set_args(Namespace(micro_batch_size=num_samples))
    parallel_state.set_tensor_model_parallel_rank(0)
    parallel_state.set_tensor_model_parallel_world_size(1)
    session.begin(Settings(FcpConfig(), 1, seq_length, "eod", "sequence", True)).eod_token = 9
    newer: batch.Batch = {"tokens": rows}
    batch.add_boundaries(newer, 9)
    older: batch.Batch = {"tokens": rows}
    batch_older.send_boundaries(older, rows)
    assert older["cu_seqlens"].shape[0] == 1
    offsets = [Boundaries.of_packed(x["cu_seqlens"], seq_length).offsets for x in (newer, older)]
    first, second = (sorted(set(x.tolist())) for x in offsets)
    return first, second, int(older["max_seqlen"])


def test_older_releases_get_the_same_boundaries(training_loop: TrainingLoop) -> None:
    tokens = [[1, 9, 9, 4, 5, 6], [7, 7, 7, 7, 7, 9], [2, 2, 2, 2, 2, 2]]
    newer, older, longest = training_loop.call("test_older_releases:boundaries_of", tokens)
    assert older == newer == [0, 2, 3, 6, 12, 18]
    assert longest == 6


def _seam_check(version: str, folder: Path) -> str:
    """What register() says to a release from the package index; "registered" if it knows it."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    got = subprocess.run(
        [*install, "--target", str(folder), f"megatron-core=={version}"], capture_output=True, text=True, timeout=300
    )
    if got.returncode:
        pytest.skip(f"megatron-core {version} cannot be installed here: {got.stderr.strip()[-200:]}")
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from megatron_fcp.testing import cpu_platform; cpu_platform.install(force=True)\n"
        "import megatron_fcp, megatron.core.package_info as info\n"
        f"assert info.__file__.startswith({str(folder)!r})\n"
        "try: megatron_fcp.register(); print('registered', info.__version__)\n"
        "except RuntimeError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.nightly(seconds=15)
def test_a_release_without_the_training_loop_is_refused(tmp_path: Path) -> None:
    """The wheel of 0.16 has no ``megatron.training``: that comes with a checkout, before it on the path."""
    message = _seam_check("0.16.1", tmp_path)
    assert "megatron-core 0.16.1 is not as megatron_fcp expects" in message
    assert "megatron.training.arguments.add_megatron_arguments is not there" in message


@pytest.mark.parametrize(
    "version",
    ["0.18.2", pytest.param("0.17.1", marks=pytest.mark.nightly(seconds=20))],
)
def test_seams_of_a_release_from_the_index(version: str, tmp_path: Path) -> None:
    """Installs the wheel into a folder of its own; it has ``megatron.training``, but no scripts to train with."""
    assert _seam_check(version, tmp_path) == f"registered {version}"
