"""Mixtures of experts: dispatchers, expert bias, shared experts, and expert parallelism beside all the others."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, MOE, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron

SPLIT_EXPERTS = {"expert_model_parallel_size": 2}
# Chosen by bias instead of an auxiliary loss, one expert for every token beside them.
BIASED = {
    **MOE,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": None,
    "moe_shared_expert_intermediate_size": 64,
}
# As many rows per expert as there are tokens: none is dropped, and every expert computes on as many.
PADDED = {**MOE, "moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}


def assert_equal(runs: Runs, world_size: int, model: dict[str, Any], flags: dict[str, Any], layout: str) -> None:
    difference = compare(runs(world_size, model, **fcp(layout), **flags, **EOD), runs(model=model, **EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.feature(
    "Parallelism: cp 2, ep 2, all-gather dispatcher", "Experts: expert bias", "Experts: shared experts"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_biased_and_shared_experts(runs: Runs, layout: str) -> None:
    assert_equal(runs, 2, BIASED, SPLIT_EXPERTS, layout)


@pytest.mark.feature("Parallelism: cp 2 x tp 2 + sp, ep 2, experts not split by tp (etp 1)")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_experts_under_tensor_parallelism(runs: Runs, layout: str) -> None:
    assert_equal(runs, 4, MOE, {**SPLIT_TENSORS, **SPLIT_EXPERTS, "expert_tensor_parallel_size": 1}, layout)


# Experts by a quantile over the whole sequence.
QUANTILE = {**MOE, "moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": None}
OTHERS = {"capacity factor, inputs padded to capacity": PADDED, "quantile balancing": QUANTILE}


@pytest.mark.nightly(seconds=10)
@pytest.mark.feature("Experts: {kind}")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_routing(runs: Runs, kind: str, layout: str) -> None:
    assert_equal(runs, 2, OTHERS[kind], SPLIT_EXPERTS, layout)


PIPELINE = {"pipeline_model_parallel_size": 2}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}  # gloo gathers equal sizes only, and tokens of split experts are not
PER_TOKEN = {"calculate_per_token_loss": True}


@pytest.mark.feature("Parallelism: cp 2 x tp 2 + sp x pp 2, ep 2, 8 ranks", "Loss: per token, cp 2 x tp 2 + sp x pp 2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_at_once(runs: Runs, layout: str) -> None:
    ranks = {**SPLIT_TENSORS, **PIPELINE, **SPLIT_EXPERTS, **WHOLE_EXPERTS}
    difference = compare(runs(8, MOE, **fcp(layout), **ranks, **PER_TOKEN, **EOD), runs(model=MOE, **PER_TOKEN, **EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


EIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cp 2 x tp 2 + sp, ep 4": (MOE, {**SPLIT_TENSORS, **WHOLE_EXPERTS, "expert_model_parallel_size": 4}),
    "cp 2 x tp 2 + sp x pp 2": ({}, {**SPLIT_TENSORS, **PIPELINE}),
}


@pytest.mark.nightly(seconds=15)
@pytest.mark.feature("Parallelism: {ranks}, 8 ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", EIGHT)
def test_eight_ranks(runs: Runs, ranks: str, layout: str) -> None:
    """Each took 15 to 17 s while the two cores were shared."""
    model, flags = EIGHT[ranks]
    assert_equal(runs, 8, model, flags, layout)
