"""A sliding window ends at the start of its document, not at that of the packed stream."""

from __future__ import annotations

import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads, random_inputs, right_answer
from megatron_fcp.testing.reference import dense_attention

pytestmark = pytest.mark.runtime

LENGTHS = [3, 1, 6, 8, 5, 7]  # inside blocks, across them, and from edge to edge
WINDOWS = [0, 1, 3, 4, 5, 7, 30]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_no_query_sees_the_document_before(cp_size: int, window: int) -> None:
    config = FcpConfig(block_size=4)
    plan = make_plan(LENGTHS, cp_size=cp_size, tokens_per_rank=32 // cp_size, config=config, window=window)
    model = Model()
    x = random_inputs(plan, model, seed=window)
    got = check_in_threads(plan, model, x=x)
    inputs = (torch.nan_to_num(t) for t in (x.q, x.k, x.v, x.dout))
    stream = dense_attention(*inputs, starts=[0], lengths=[32], window=window)
    if window:  # what a window clamped to the stream would give is not what came out
        assert (got.out - stream.out)[:30].abs().max() > 1e-2
    assert (right_answer(plan, model, x).out - got.out).abs().max() < 1e-12


@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_travels_between_documents(window: int) -> None:
    config = FcpConfig(block_size=4)
    edges = make_plan([4] * 8, cp_size=4, tokens_per_rank=8, config=config, window=window)
    assert len(edges.schedule.messages) == 0
    inside = make_plan([2, 4, 4, 4, 4, 4, 4, 4, 2], cp_size=4, tokens_per_rank=8, config=config, window=window)
    shared = inside.table.shared_stop - inside.table.shared_start
    assert shared.tolist() == [*[min(window, 2)] * 7, 0]  # of the two tokens of a document that goes on, no others
