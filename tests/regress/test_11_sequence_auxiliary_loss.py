"""The sequence auxiliary loss of MoE takes a pack for one sequence, or scales with tensor and context parallelism.

https://github.com/NVIDIA/Megatron-LM/issues/6108, https://github.com/NVIDIA/Megatron-LM/pull/5996 (wrong at TP 2 with
a micro-batch of 2), https://github.com/NVIDIA/Megatron-LM/issues/5047

Where a rank's tokens are those of Megatron's own sharding the loss is that of one rank; where they are not, or where
several samples share a stream, it is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import MOE, SPLIT_TENSORS, Runs, fcp
from test_fcp_refusals import messages

from megatron_fcp.testing.loop import TrainingLoop, compare

pytestmark = pytest.mark.megatron

SEQUENCE_AUX = {**MOE, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-1}
SHORT = {"train_iters": 2, "micro_batch_size": 2}


def refusals(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Runs in a rank."""
    return messages(cases)


@pytest.mark.parametrize("split", [{}, SPLIT_TENSORS], ids=["cp 2", "cp 2 x tp 2"])
def test_loss_and_gradients_are_those_of_one_rank(runs: Runs, split: dict[str, Any]) -> None:
    world = 2 * split.get("tensor_model_parallel_size", 1)
    reference = runs(model=SEQUENCE_AUX, **SHORT)
    difference = compare(runs(world, SEQUENCE_AUX, **fcp("reshuffle"), **split, **SHORT), reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
    without = compare(runs(model={**SEQUENCE_AUX, "moe_aux_loss_coeff": 0}, **SHORT), reference)
    assert without.gradient > 1e-3, "the loss must be seen in the gradients"


def test_what_would_take_a_pack_for_a_sequence_is_refused(training_loop: TrainingLoop) -> None:
    packed = {"moe_router_load_balancing_type": "seq_aux_loss", "num_experts": 4, "micro_batch_size": 2}
    cases = [
        {**packed, "fcp_layout": "resident"},
        {**packed, "sft": True},
        {**packed, "dataloader_inter_document_masking": True},
        {**packed, "reset_attention_mask": True},
        {**packed, "reset_attention_mask": True, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        packed,
    ]
    *refused, accepted = training_loop.call("test_11_sequence_auxiliary_loss:refusals", cases)
    for texts in refused:
        assert any("--moe-router-load-balancing-type seq_aux_loss" in text and "aux_loss or global_aux_loss" in text
                   for text in texts), texts  # fmt: skip
    assert accepted == []
