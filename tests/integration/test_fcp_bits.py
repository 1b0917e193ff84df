"""Same run, same bits: twice, with recomputation, and across a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, MOE, RECOMPUTE, Runs, fcp

from megatron_fcp.testing.loop import TrainingResult, compare

pytestmark = pytest.mark.megatron


def assert_same_bits(result: TrainingResult, reference: TrainingResult) -> None:
    assert result.losses == reference.losses
    assert result.grad_norms == reference.grad_norms
    assert result.gradients
    assert result.parameters
    for kind in ("gradients", "parameters"):
        for name, expected in getattr(reference, kind).items():
            np.testing.assert_array_equal(getattr(result, kind)[name], expected, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_run_twice(runs: Runs, layout: str) -> None:
    wide = {"seq_length": 192, "max_position_embeddings": 192}
    flags = {**fcp(layout, 3), **EOD}
    assert_same_bits(Runs(runs.loop)(3, wide, **flags), runs(3, wide, **flags))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(RECOMPUTE, id="full", marks=pytest.mark.feature("Recomputation: full, uniform, cp 2 x pp 2")),
        pytest.param(
            {"recompute_granularity": "selective", "recompute_modules": "core_attn"},
            id="selective",
            marks=pytest.mark.feature("Recomputation: selective, core_attn, cp 2 x pp 2"),
        ),
    ],
)
def test_recomputation(runs: Runs, recompute: dict[str, Any], layout: str) -> None:
    flags = {**fcp(layout), **EOD, "pipeline_model_parallel_size": 2}  # several batches in flight
    assert_same_bits(runs(4, **flags, **recompute), runs(4, **flags))


def test_recomputation_of_whole_samples_and_experts(runs: Runs) -> None:
    assert_same_bits(runs(2, MOE, **fcp("resident"), **RECOMPUTE), runs(2, MOE, **fcp("resident")))


@pytest.mark.feature("Checkpoints: saved at cp 2 with FCP, resumed at cp 1 without, and back")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_moves_between_backends(runs: Runs, layout: str, tmp_path: Path) -> None:
    """Saved with FCP on two ranks, resumed on one without it, and the other way round."""
    save = {"save": tmp_path, "save_interval": 2, "ckpt_format": "torch_dist", "train_iters": 4, **EOD}
    whole = runs(train_iters=4, **EOD)
    for first, then, folder in (
        ((2, fcp(layout)), (1, {}), tmp_path / "fcp"),
        ((1, {}), (2, fcp(layout)), tmp_path / "native"),
    ):
        flags = {**save, "save": folder, "exit_interval": 2}
        start = runs(first[0], **first[1], **flags)
        resumed = runs(then[0], load=folder, pretrained_checkpoint=None, **then[1], **{**EOD, "train_iters": 4})
        np.testing.assert_allclose(start.losses + resumed.losses, whole.losses, rtol=1e-5)


@pytest.mark.feature("Schedule: evaluation inside training")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation(runs: Runs, layout: str) -> None:
    evaluate = {"eval_iters": 2, "eval_interval": 2, "split": "80,20,0", **INDEX}

    def validation_losses(result: TrainingResult) -> list[float]:
        log = "\n".join(rank.log for rank in result.ranks)
        return [float(value) for value in re.findall(r"validation loss at .*?lm loss value: (\S+)", log)]

    reference = runs(context_parallel_backend="fcp", **evaluate)
    result = runs(2, **fcp(layout), **evaluate)
    assert len(validation_losses(reference)) >= 2
    np.testing.assert_allclose(validation_losses(result), validation_losses(reference), rtol=1e-5)
    assert compare(result, reference).loss < 1e-5
