"""Right numbers from a lopsided layout: the ranks' loads are asserted, not only what they compute.

Seen wherever documents are dealt out whole or by token counts alone; causal attention costs a late block more than an
early one (https://github.com/zhuzilin/ring-flash-attention/issues/52).
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.sharding import contiguous
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.hardware import AttentionShape
from megatron_fcp.simulate.price import price_plan

pytestmark = pytest.mark.plan

CP_SIZE, TOKENS = 32, 8192
STREAM = CP_SIZE * TOKENS
STREAMS = {
    **{name: draw_lengths(name, num_tokens=STREAM, seed=3) for name in ("longtail", "weaktail", "bimodal", "prolong")},
    "one document": np.array([STREAM]),
    "one giant, many ones": np.array([*[1] * 500, STREAM - 1000, *[1] * 500]),
    "short documents": np.full(STREAM // 512, 512),
}


def pairs_of_tokens(plan: Plan) -> np.ndarray:
    """Keys that each token of the stream attends to; 0 on padding."""
    documents, table = plan.table.token_documents(), plan.table
    place = np.arange(table.num_tokens) - table.document_start[documents]
    return np.where(documents >= 0, place + 1, 0)


@pytest.mark.parametrize("stream", STREAMS)
def test_pairs_are_spread_to_within_a_block(stream: str) -> None:
    plan = make_plan(STREAMS[stream], cp_size=CP_SIZE, tokens_per_rank=TOKENS, config=FcpConfig(block_size=512))
    held = [plan.rank_plan(rank).local_token_global_indices for rank in range(CP_SIZE)]
    assert {index.size for index in held} == {TOKENS}, "memory and the linear layers are even as well"
    pairs = pairs_of_tokens(plan)
    load = np.array([pairs[index].sum() for index in held])
    largest = pairs.reshape(-1, 512).sum(axis=1).max()
    assert load.max() - load.mean() <= largest, "no rank carries more than a block beyond its share"
    assert load.max() / load.mean() < 1.1
    straight = np.array([pairs[index].sum() for index in contiguous(STREAM, CP_SIZE)])
    if stream != "short documents":
        assert straight.max() / straight.mean() > 1.3, "these streams are lopsided when they are dealt out in order"


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("workload", ["longtail", "weaktail", "bimodal", "prolong"])
def test_priced_compute_is_spread_to_two_percent(workload: str, hardware: str) -> None:
    """64 ranks of 32K tokens: the most seen is 1.017, on bimodal."""
    cost = load_hardware(hardware).cost(AttentionShape())
    lengths = draw_lengths(workload, num_tokens=64 * 32768, seed=3)
    plan = make_plan(lengths, cp_size=64, tokens_per_rank=32768, hardware=cost)
    assert price_plan(plan, cost).imbalance <= 1.02
