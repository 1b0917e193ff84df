"""Partial outputs or gradients in 16 bits, and exp overflow in the merge: the loss looks fine, the gradients are not.

https://github.com/zhuzilin/ring-flash-attention/issues/42, https://github.com/Dao-AILab/flash-attention/issues/1088
"""

import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import (
    NAMES,
    Model,
    check_in_threads,
    gather,
    largest_errors,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

LENGTH = 256


def errors(cp_size: int, block_size: int, model: Model) -> dict[str, float]:
    config = FcpConfig(block_size=block_size, rounds_per_stage=1, blocks_per_message=1)
    plan = make_plan([LENGTH], cp_size=cp_size, tokens_per_rank=LENGTH // cp_size, config=config)
    x = random_inputs(plan, model, 7)
    want = right_answer(plan, model, x)
    got = run_ranks(cp_size, lambda comm: run_rank(comm, plan, model, x), mode="eager")
    return largest_errors(plan, gather(got, want), want)


@pytest.mark.parametrize("spread", [1.0, 25.0], ids=["logits of 1", "logits of 80"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_errors_do_not_grow_with_the_number_of_blocks(dtype: torch.dtype, spread: float) -> None:
    model = Model(dtype=dtype, spread=spread)
    one = errors(1, LENGTH, model)
    for block_size in (64, 16, 2):  # 2: more than a hundred merges and as many sums
        many = errors(4, block_size, model)
        for name in NAMES:
            assert many[name] <= 2 * one[name], (block_size, name, many, one)


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
def test_logits_of_80_in_fp64(layout: str) -> None:
    plan = make_plan([30, 31], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4))
    check_in_threads(plan, Model(spread=25.0, layout=layout))  # type: ignore[arg-type]
