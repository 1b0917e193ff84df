"""Twenty steps of Megatron's real loop with FCP equal those of one rank, in every layout of ranks that works."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, MOE, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingResult, compare

pytestmark = pytest.mark.megatron

STEPS = {"train_iters": 20, "global_batch_size": 2}
WIDE = {"seq_length": 192, "max_position_embeddings": 192}  # divisible by 2 * 3

# Name: model, number of ranks, context-parallel size, other flags.
RANKS: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "Parallelism: cp 2": ({}, 2, 2, {}),
    "Parallelism: cp 3": (WIDE, 3, 3, {}),
    "Parallelism: cp 4": ({}, 4, 4, {}),
    "Parallelism: cp 2 x tp 2 + sp": ({}, 4, 2, SPLIT_TENSORS),
    "Parallelism: cp 2 x pp 2": ({}, 4, 2, {"pipeline_model_parallel_size": 2}),
    "Parallelism: cp 2, ep 2, all-to-all dispatcher": (MOE, 2, 2, {"expert_model_parallel_size": 2}),
    "Optimizer: distributed, cp 2 x dp 2": ({}, 4, 2, {"use_distributed_optimizer": True}),
}
DATA: dict[str, dict[str, Any]] = {"whole samples": {}, "documents": EOD}


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.feature(
    "{ranks}", "Data: documents by end-of-document tokens", "Attention: grouped queries (GQA)", "Positions: RoPE"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_documents_equal_one_rank(runs: Runs, ranks: str, layout: str) -> None:
    model, world_size, cp_size, flags = RANKS[ranks]
    reference = runs(model=model, **STEPS, **EOD)
    assert len(reference.losses) == 20
    assert_equal(runs(world_size, model, **fcp(layout, cp_size), **STEPS, **EOD, **flags), reference)


@pytest.mark.feature("Data: whole samples")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [f"Parallelism: {r}" for r in ("cp 2", "cp 4", "cp 2 x tp 2 + sp", "cp 2 x pp 2")])
def test_whole_samples_equal_one_rank(runs: Runs, ranks: str, layout: str) -> None:
    model, world_size, cp_size, flags = RANKS[ranks]
    assert_equal(runs(world_size, model, **fcp(layout, cp_size), **STEPS, **flags), runs(model=model, **STEPS))


@pytest.mark.feature("Data: {data}, micro-batch 2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [f"Parallelism: {r}" for r in ("cp 2", "cp 2 x tp 2 + sp", "cp 2 x pp 2")])
@pytest.mark.parametrize("data", DATA)
def test_samples_of_a_micro_batch_share_one_stream(runs: Runs, data: str, ranks: str, layout: str) -> None:
    model, world_size, cp_size, flags = RANKS[ranks]
    two = {"micro_batch_size": 2, **DATA[data]}
    assert_equal(runs(world_size, model, **fcp(layout, cp_size), **two, **flags), runs(model=model, **two))


@pytest.mark.parametrize("backend", ["fcp", "native"])
def test_one_rank_runs_megatrons_own_attention(runs: Runs, backend: str) -> None:
    result = runs(context_parallel_backend=backend, fcp_layout="resident", fcp_block_size=8, **EOD)
    reference = runs(**EOD)
    assert result.losses == reference.losses
    assert result.grad_norms == reference.grad_norms


@pytest.mark.feature("Precision: bf16")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_stays_within_rounding(runs: Runs, layout: str) -> None:
    bf16 = {"bf16": True, **EOD}
    difference = compare(runs(2, **fcp(layout), **bf16), runs(**bf16))
    assert difference.loss < 2e-3  # half a unit in the last of bf16's 8 digits
