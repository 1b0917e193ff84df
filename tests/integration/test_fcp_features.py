"""Features of models and schedules, each against one rank with the same feature."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, MOE, Runs, fcp

from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron

NO_GROUPS = {"group_query_attention": None, "num_query_groups": None}
SEQUENCE_AUX = {**MOE, "moe_router_load_balancing_type": "seq_aux_loss"}

# Row of the matrix: flags that decide on the weights, layouts, other flags.
FEATURES: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "Loss: multi-token prediction, whole samples": ({"mtp_num_layers": 1}, LAYOUTS, {"eod_mask_loss": True}),
    "Loss: multi-token prediction, whole samples, depth 2": ({"mtp_num_layers": 2}, ("reshuffle",), {}),
    "Experts: sequence auxiliary loss": (SEQUENCE_AUX, ("reshuffle",), {}),
    "Experts: global auxiliary and z loss": ({**MOE, "moe_z_loss_coeff": 1e-3}, LAYOUTS, EOD),
    "Attention: QK layer norm": ({"qk_layernorm": True}, LAYOUTS, EOD),
    "Attention: one KV head (MQA)": ({"num_query_groups": 1}, LAYOUTS, EOD),
    "Attention: as many KV heads as query heads": (
        {"group_query_attention": None, "num_query_groups": None},
        LAYOUTS,
        EOD,
    ),
    "Positions: learned": ({"position_embedding_type": "learned_absolute"}, LAYOUTS, EOD),
    "Positions: none": ({"position_embedding_type": "none"}, LAYOUTS, EOD),
    "Positions: RoPE on part of the channels": ({"rotary_percent": 0.5}, LAYOUTS, EOD),
    "Positions: RoPE scaled as in Llama 3": ({"use_rope_scaling": True}, LAYOUTS, EOD),
    "Loss: per token (`--calculate-per-token-loss`)": ({}, LAYOUTS, {"calculate_per_token_loss": True, **EOD}),
    "Recomputation: selective": ({}, LAYOUTS, {"recompute_granularity": "selective", **EOD}),
    "Schedule: gradient accumulation": ({}, LAYOUTS, {"global_batch_size": 4, **EOD}),
}
CASES = [
    pytest.param(name, layout, marks=pytest.mark.feature(name.removesuffix(", depth 2")))
    for name, (_, layouts, _) in FEATURES.items()
    for layout in layouts
]


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_feature_equals_one_rank(runs: Runs, feature: str, layout: str) -> None:
    model, _, flags = FEATURES[feature]
    difference = compare(runs(2, model, **fcp(layout), **flags), runs(model=model, **flags))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.feature("Parallelism: virtual pipeline stages")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_virtual_pipeline_stages_equal_one_rank(runs: Runs, layout: str) -> None:
    model = {"num_layers": 4}
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    difference = compare(runs(4, model, **fcp(layout), **stages, **EOD), runs(model=model, **EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


def three_axes() -> None:
    """Runs in the ranks: M-RoPE's positions, of the whole sequence, as Megatron's embedding wants them."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.training import get_args

    original = GPTModel.forward

    def forward(self: Any, input_ids: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        time = torch.arange(get_args().seq_length)
        axes = torch.stack([time, time // 4, time % 7])
        return original(self, input_ids, axes[:, None].expand(3, input_ids.shape[0], -1), *args, **kwargs)

    GPTModel.forward = forward


@pytest.mark.feature("Positions: M-RoPE, whole samples", layout="reshuffle")
def test_multimodal_positions_equal_one_rank(runs: Runs) -> None:
    mrope = {
        "position_embedding_type": "mrope",
        "mrope_section": (4, 2, 2),
        "before": ("test_fcp_features:three_axes",),
    }
    reference = runs(**mrope)
    assert compare(reference, runs()).gradient > 1e-4  # the positions tell
    difference = compare(runs(2, **fcp("reshuffle"), **mrope), reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
