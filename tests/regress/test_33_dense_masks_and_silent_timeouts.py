"""Masks or logits of sequence length squared, and time-outs that name nobody.

https://github.com/NVIDIA/Megatron-LM/issues/1155, https://github.com/NVIDIA/NeMo-Aligner/issues/488,
https://github.com/NovaSky-AI/SkyRL/issues/1751, https://github.com/pytorch/pytorch/issues/118369
"""

from __future__ import annotations

import re
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from test_fcp_refusals import _validated
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.runtime import Communicator, CompiledPlan
from megatron_fcp.testing.attention_check import Model, random_inputs, run_rank
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.loop import TrainingLoop, tiny_model_args
from megatron_fcp.testing.pool import JobError
from megatron_fcp.testing.threads import ThreadTransport, run_ranks

MODEL = Model(num_heads=1, num_kv_heads=1, head_dim_qk=8, head_dim_v=8, dtype=torch.float32, kernel="torch-cpu")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.runtime
@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
def test_attention_makes_nothing_of_tokens_squared(layout: str) -> None:
    tokens = 4096
    model = Model(**{**MODEL.__dict__, "layout": layout})
    plan = make_plan([tokens - 700, 640], cp_size=2, tokens_per_rank=tokens // 2, config=FcpConfig(block_size=256))
    x = random_inputs(plan, model, 0)

    def largest(comm: ThreadTransport) -> int:
        with Largest() as seen:
            run_rank(comm, plan, model, x)
        return seen.elements

    whole = tokens * 8  # one tensor of the stream
    for elements in run_ranks(2, largest):
        assert whole // 2 <= elements <= 2 * whole
        assert elements < tokens * tokens // 100


@pytest.mark.plan
def test_a_plan_grows_with_the_tokens_not_with_their_square() -> None:
    peaks = []
    for tokens in (1 << 16, 1 << 18):
        lengths = np.full(4, tokens // 4)
        tracemalloc.start()
        plan = make_plan(lengths, cp_size=8, tokens_per_rank=tokens // 8, config=FcpConfig(block_size=1024))
        CompiledPlan(plan.rank_plan(7))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert peaks[-1] < 100 * tokens, "a dense mask would take tokens / 8 * tokens bytes on this rank"
    assert peaks[1] < 8 * peaks[0]


def dense_masks(_: None) -> list[bool]:
    """Runs in a rank: whether the data loader is to build attention masks."""
    import megatron_fcp

    megatron_fcp.register()
    asked = {"context_parallel_size": 2, "context_parallel_backend": "fcp"}
    documents = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    return [
        _validated(tiny_model_args(**asked, **more)).create_attention_mask_in_dataloader for more in ({}, documents)
    ]


@pytest.mark.megatron
def test_the_data_loader_builds_no_mask(training_loop: TrainingLoop) -> None:
    """Megatron's own mask is a byte per pair of tokens in every sample: 256 GB at 512K tokens."""
    assert training_loop.call("test_33_dense_masks_and_silent_timeouts:dense_masks", None) == [False, False]


def dawdle(comm: Communicator) -> None:
    plan = make_plan([30], cp_size=2, tokens_per_rank=16, config=FcpConfig(block_size=4))
    comm.note = "batch 11"
    if comm.rank == 1:
        time.sleep(60)
    run_rank(comm, plan, Model(), random_inputs(plan, Model(), 0))


@pytest.mark.runtime
def test_a_time_out_names_rank_round_and_plan(gloo: GlooPool) -> None:
    digest = make_plan([30], cp_size=2, tokens_per_rank=16, config=FcpConfig(block_size=4)).digest
    with pytest.raises(JobError) as caught:
        gloo.run(2, dawdle, timeout=60, fcp_timeout_s=2.0, grace=30.0)
    waiting = caught.value.ranks[0]
    text = waiting.details
    assert waiting.error.startswith("FcpTimeout"), waiting
    assert "rank 1" in text
    assert re.search(r"forward of attention, step \d+ of \d+, pull round \d+", text), text
    assert f"plan {digest[:12]}" in text
    assert "batch 11" in text
    assert len(re.findall(r"^> \d+ ", text, re.MULTILINE)) == 1, "the plan is dumped with a mark at the rank's step"
