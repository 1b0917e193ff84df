"""Backward attends again to the keys of its first step: right at two ranks, wrong from three on.

https://github.com/huggingface/diffusers/issues/14265
"""

import pytest

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import check_in_threads

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("cp_size", [3, 5, 8])
def test_gradients_with_different_data_on_every_rank_and_stage(cp_size: int, mask: Mask) -> None:
    config = FcpConfig(block_size=2, mask=mask, rounds_per_stage=1, blocks_per_message=1)
    plan = make_plan([cp_size * 8], cp_size=cp_size, tokens_per_rank=8, config=config)
    assert len(plan.rank_plan(cp_size - 1).stages) > 3
    check_in_threads(plan)
