"""Real and padded document boundaries are mixed up: tokens, positions and attention follow different arrays.

https://github.com/NVIDIA/Megatron-LM/issues/5541, https://github.com/NVIDIA-NeMo/RL/issues/4070
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads, random_inputs
from megatron_fcp.testing.loop import TrainingLoop
from megatron_fcp.testing.reference import dense_attention

pytestmark = pytest.mark.runtime

LENGTHS = [3, 9, 1, 8, 14]  # real tokens; every document is padded to a multiple of 8, as for 2 * cp_size at cp 4
PADDED = [8, 16, 8, 8, 16]
STARTS = np.concatenate([[0], np.cumsum(PADDED)[:-1]])


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
def test_plan_of_both_arrays_leaves_padding_alone(layout: str) -> None:
    """Real lengths at padded starts: NaN on padding reaches nothing, and padding gets exactly 0."""
    config = FcpConfig(block_size=4)
    plan = make_plan(LENGTHS, starts=STARTS, cp_size=4, tokens_per_rank=16, config=config)
    check_in_threads(plan, Model(layout=layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
def test_padded_documents_equal_real_ones(layout: str) -> None:
    """Megatron hands on padded boundaries alone: causal attention keeps what lies behind from the real tokens."""
    model = Model(layout=layout)  # type: ignore[arg-type]
    plan = make_plan(PADDED, cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4))
    x = random_inputs(plan, model, 5)
    padding = torch.ones(plan.table.num_tokens, dtype=torch.bool)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        padding[start : start + length] = False
    garbage = {name: torch.where(padding[:, None, None], 1e3, getattr(x, name)) for name in ("q", "k", "v")}
    x = dataclasses.replace(x, dout=x.dout * ~padding[:, None, None], **garbage)
    got = check_in_threads(plan, model, x=x)
    want = dense_attention(x.q, x.k, x.v, x.dout, starts=STARTS.tolist(), lengths=LENGTHS)
    for name in ("out", "dq", "dk", "dv"):
        mine, right = getattr(got, name), getattr(want, name)
        assert (mine - right)[~padding].abs().max() < 1e-12, name
        if name != "out":
            assert (mine[padding] == 0).all(), f"{name} of padding"


def placed(_: None) -> list[list[list[int]]]:
    """Runs in a rank: tokens and positions of two ranks by the batch's arrays, and by those of PackedSeqParams."""
    import megatron_fcp
    from megatron_fcp.integration import batch
    from megatron_fcp.integration.settings import Settings
    from megatron_fcp.testing.lone_rank import begin_alone

    megatron_fcp.register()
    from megatron.core.packed_seq_params import PackedSeqParams

    real = torch.tensor([0, 3, 12, 13, 21, 35], dtype=torch.int32)
    padded = torch.tensor([0, 8, 24, 32, 40, 56], dtype=torch.int32)
    found = []
    for layout in ("resident", "reshuffle"):
        for rank in range(2):
            begin_alone(Settings(FcpConfig(block_size=4, layout=layout), 2, 56, "packed", "document", True), rank)
            given = {"tokens": torch.arange(56)[None], "cu_seqlens": real[None], "cu_seqlens_padded": padded[None]}
            taken = batch.wrap_get_batch_on_this_cp_rank(lambda batch: batch)(given)["tokens"]
            documents = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=real,
                cu_seqlens_kv=real,
                cu_seqlens_q_padded=padded,
                cu_seqlens_kv_padded=padded,
            )
            held: Any = documents.fcp_layout
            found.append([taken[0].tolist(), held.index.tolist(), held.positions.tolist()])
    return found


@pytest.mark.megatron
def test_batch_and_attention_follow_the_padded_array(training_loop: TrainingLoop) -> None:
    starts = np.array([0, 8, 24, 32, 40])
    found = training_loop.call("test_05_real_and_padded_boundaries:placed", None)
    assert len(found) == 4
    for taken, held, positions in found:
        assert taken == held
        tokens = np.array(taken)
        np.testing.assert_array_equal(positions, tokens - starts[np.searchsorted(starts, tokens, "right") - 1])
    for first, second in (found[:2], found[2:]):
        assert sorted(first[0] + second[0]) == list(range(56))
