"""Settings of a training job around FCP: unusual attention, recomputation, growing batches, overlapped optimizers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, MLA, MOE, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingResult, compare

pytestmark = pytest.mark.megatron

# One model with much that is rare: each of these changes the result by itself.
RARE = {
    "attention_output_gate": True,
    "add_qkv_bias": True,
    "no_rope_freq": 2,
    "use_mup": True,
    "mup_base_hidden_size": 32,
    "mup_base_head_dim": 8.0,  # a softmax scale of its own
    "apply_query_key_layer_scaling": True,
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 32,
    "deterministic_mode": True,
}


def batch_sizes(result: TrainingResult) -> list[int]:
    """Global batch size of every step, as Megatron logs it."""
    return [int(size) for size in re.findall(r"global batch size:\s+(\d+) ", result.ranks[0].log)]


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.feature("Attention: output gate", "Attention: bias of Q, K and V", "Attention: softmax scale (MuP)")
@pytest.mark.feature("Attention: `--apply-query-key-layer-scaling` (softmax in fp32)")
@pytest.mark.feature("Positions: YaRN", "Positions: layers without RoPE", "Other flags: `--deterministic-mode`")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rare_attention(runs: Runs, layout: str) -> None:
    assert_equal(runs(2, RARE, **fcp(layout), **EOD), runs(model=RARE, **EOD))


@pytest.mark.nightly(seconds=9)
@pytest.mark.feature("Attention: MLA with 192 channels per key and 128 per value")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mla_of_full_size(runs: Runs, layout: str) -> None:
    model = {**MLA, "rope_type": "yarn", "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    assert_equal(runs(2, model, **fcp(layout), **EOD), runs(model=model, **EOD))


@pytest.mark.nightly(seconds=18)
@pytest.mark.feature("Precision: fp16, static loss scale")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_stays_within_rounding(runs: Runs, layout: str) -> None:
    fp16 = {"fp16": True, "loss_scale": 1024, **EOD}
    difference = compare(runs(2, **fcp(layout), **fp16), runs(**fp16))
    assert difference.loss < 2e-4
    assert difference.gradient < 4e-3  # four units in the last of fp16's 11 digits


RECOMPUTATION: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "full, block, cp 2 x pp 2": (
        {"num_layers": 4},
        4,
        {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        },
    ),
    "full, saved activations distributed, cp 2 x tp 2": (
        {},
        4,
        {
            "tensor_model_parallel_size": SPLIT_TENSORS["tensor_model_parallel_size"],
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "distribute_saved_activations": True,
        },
    ),
    "selective, core_attn, mlp and layernorm": (
        {},
        2,
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    ),
    "selective, MLA's up-projection": (
        {**MLA, "rope_type": "yarn"},
        2,
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mla_up_proj")},
    ),
    "selective, experts": (
        MOE,
        2,
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe")},
    ),
}
SLOW = {
    "full, saved activations distributed, cp 2 x tp 2",
    "selective, core_attn, mlp and layernorm",
    "selective, experts",
}


@pytest.mark.feature("Recomputation: {kind}")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.nightly(seconds=12)] if k in SLOW else []) for k in RECOMPUTATION]
)
def test_recomputation_equals_one_rank(runs: Runs, kind: str, layout: str) -> None:
    model, world_size, flags = RECOMPUTATION[kind]
    assert_equal(runs(world_size, model, **fcp(layout), **flags, **EOD), runs(model=model, **EOD))


STEPS = {"step_batch_size_schedule": "0:2 512:4", "global_batch_size": None}  # 4 samples from the 512th token on
SAMPLES = {"train_iters": None, "train_samples": 8, "lr_decay_samples": 8}


@pytest.mark.feature("Schedule: growing batches (`--step-batch-size-schedule`)", "Loss: fused cross entropy")
@pytest.mark.feature("Optimizer: distributed, `--overlap-grad-reduce --overlap-param-gather`, cp 2 x dp 2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_growing_batches_with_overlapped_optimizer(runs: Runs, layout: str) -> None:
    overlap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    fused = {"cross_entropy_loss_fusion": True}
    reference = runs(**STEPS, **SAMPLES, **fused, **EOD)
    assert batch_sizes(reference) == [2, 2, 4]
    result = runs(4, **fcp(layout), **STEPS, **SAMPLES, **fused, **overlap, ddp_bucket_size=20000, **EOD)
    assert_equal(result, reference)


RAMPUP = (
    "Megatron 0.19 takes the flag and trains with --global-batch-size all the same: pass --step-batch-size-schedule"
)


@pytest.mark.feature("Schedule: batch-size ramp-up (`--rampup-batch-size`)", layout="both", not_run=RAMPUP)
def test_ramp_up_is_without_effect(runs: Runs) -> None:
    samples = {**SAMPLES, "rampup_batch_size": (2, 2, 4), "global_batch_size": 4}
    assert batch_sizes(runs(**samples, **EOD)) == [4, 4]
