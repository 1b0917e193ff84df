"""What FCP lets pass and nothing here can run: Transformer Engine's own features, which leave attention alone."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, tiny_model_args
from megatron_fcp.testing.pool import JobError

pytestmark = pytest.mark.megatron

FP8 = "linear layers compute in FP8 inside Transformer Engine only; without it the flag changes nothing"


@pytest.mark.feature("Precision: FP8 in linear layers (`--fp8-format`)", layout="both", not_run=FP8)
def test_fp8_changes_nothing_without_transformer_engine(runs: Runs) -> None:
    bf16 = {"bf16": True, **EOD}
    assert runs(2, **fcp("reshuffle"), **bf16, fp8_format="hybrid").losses == runs(2, **fcp("reshuffle"), **bf16).losses


def needs(row: str, world_size: int, flags: dict[str, Any], words: str) -> Any:
    """A flag that Megatron itself refuses without Transformer Engine, after FCP has let it pass."""
    mark = pytest.mark.feature(row, layout="both", not_run="Megatron refuses it without Transformer Engine")
    return pytest.param(world_size, flags, words, id=words, marks=mark)


@pytest.mark.parametrize(
    ("world_size", "flags", "words"),
    [
        needs(
            "Precision: FP4 in linear layers (`--fp4-format`)",
            2,
            {"fp4_format": "e2m1", "bf16": True},
            "--fp4-format requires Transformer Engine",
        ),
        needs(
            "Parallelism: overlap of tensor-parallel communication (`--tp-comm-overlap`)",
            4,
            {"tp_comm_overlap": True, **SPLIT_TENSORS},
            "Tensor Parallel Communication/GEMM Overlap optimization needs",
        ),
        needs(
            "Parallelism: weights split beyond tensor parallelism (`--tensor-parallel-num-weight-shards`)",
            4,
            {"tensor_parallel_num_weight_shards": 2},
            "GTP requires TransformerEngine",
        ),
    ],
)
def test_megatron_asks_for_transformer_engine(
    training_loop: TrainingLoop, world_size: int, flags: dict[str, Any], words: str
) -> None:
    job = TrainingJob(tiny_model_args(**fcp("reshuffle"), **flags), world_size, grace=30)
    with pytest.raises(JobError) as caught:
        training_loop.run(job)
    for rank in caught.value.ranks:
        assert words in rank.error
