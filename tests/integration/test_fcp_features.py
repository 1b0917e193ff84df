"""Features of models and schedules, each against one rank with the same feature."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, MOE, Runs, fcp

from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron

SEQUENCE_AUX = {**MOE, "moe_router_load_balancing_type": "seq_aux_loss"}

# Name: flags that decide on the weights, layouts, other flags.
FEATURES: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "multi-token prediction, depth 1": ({"mtp_num_layers": 1}, ("reshuffle",), {}),
    "multi-token prediction, depth 2": ({"mtp_num_layers": 2}, ("reshuffle",), {}),
    "sequence auxiliary loss": (SEQUENCE_AUX, ("reshuffle",), {}),
    "global auxiliary and z loss": ({**MOE, "moe_z_loss_coeff": 1e-3}, LAYOUTS, EOD),
    "QK layer norm": ({"qk_layernorm": True}, LAYOUTS, EOD),
    "one KV head": ({"num_query_groups": 1}, LAYOUTS, EOD),
    "one KV head per query head": ({"group_query_attention": None, "num_query_groups": None}, LAYOUTS, EOD),
    "learned positions": ({"position_embedding_type": "learned_absolute"}, LAYOUTS, EOD),
    "no positions": ({"position_embedding_type": "none"}, LAYOUTS, EOD),
    "part of the channels rotated": ({"rotary_percent": 0.5}, LAYOUTS, EOD),
    "Llama 3 RoPE scaling": ({"use_rope_scaling": True}, LAYOUTS, EOD),
    "loss per token": ({}, LAYOUTS, {"calculate_per_token_loss": True, **EOD}),
    "selective recomputation": ({}, LAYOUTS, {"recompute_granularity": "selective", **EOD}),
    "gradient accumulation": ({}, LAYOUTS, {"global_batch_size": 4, **EOD}),
}
CASES = [(name, layout) for name, (_, layouts, _) in FEATURES.items() for layout in layouts]


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_feature_equals_one_rank(runs: Runs, feature: str, layout: str) -> None:
    model, _, flags = FEATURES[feature]
    difference = compare(runs(2, model, **fcp(layout), **flags), runs(model=model, **flags))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_virtual_pipeline_stages_equal_one_rank(runs: Runs, layout: str) -> None:
    model = {"num_layers": 4}
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    difference = compare(runs(4, model, **fcp(layout), **stages, **EOD), runs(model=model, **EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
