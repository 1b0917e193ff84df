"""``cu_seqlens`` whose tail repeats the last offset: documents of no length, as Megatron's own dataset pads.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4489, https://github.com/pytorch/torchtitan/issues/4158
"""

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.testing.attention_check import check_in_threads

pytestmark = pytest.mark.runtime


def plan_of(cu_seqlens: list[int]) -> Plan:
    config = FcpConfig(block_size=2)
    return make_plan(np.diff(cu_seqlens), cp_size=2, tokens_per_rank=6, config=config)


@pytest.mark.parametrize("padded", [[0, 5, 9, 9, 9], [0, 0, 5, 9], [0, 5, 5, 5, 9, 9]], ids=str)
def test_same_digest_and_same_bits_as_the_trimmed_array(padded: list[int]) -> None:
    trimmed = plan_of([0, 5, 9])
    plan = plan_of(padded)
    assert plan.digest == trimmed.digest
    for a, b in zip(check_in_threads(plan).tensors(), check_in_threads(trimmed).tensors()):
        assert torch.equal(a, b)
