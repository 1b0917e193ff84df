"""Entries of no length reach a variable-length kernel, which hangs or returns garbage.

https://github.com/Dao-AILab/flash-attention/issues/1537, https://github.com/Dao-AILab/flash-attention/issues/2421
"""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.runtime.kernels.torch_cpu_flash import TorchCpuFlash
from megatron_fcp.testing.attention_check import check_in_threads
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.runtime


class Strict(TorchCpuFlash):
    """Refuses calls without work and entries without queries or keys."""

    def __init__(self) -> None:
        self.calls = 0

    def _check(self, work: Any) -> None:
        self.calls += 1
        assert work.items
        assert all(q0 < q1 and k0 < k1 for q0, q1, k0, k1 in work.items)
        for cu in (work.cu_seqlens_q, work.cu_seqlens_kv):
            assert (cu.diff() > 0).all()

    def forward(self, q, k, v, work, scale) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        self._check(work)
        return super().forward(q, k, v, work, scale)

    def backward(self, *args: Any) -> None:
        self._check(args[6])
        super().backward(*args)


def test_lengths_zero_one_zero_one() -> None:
    for cp_size in (1, 2, 4):
        kernel = Strict()
        plan = make_plan([0, 1, 0, 1], cp_size=cp_size, tokens_per_rank=4, config=FcpConfig(block_size=2))
        check_in_threads(plan, kernel=kernel)
        assert kernel.calls == 2, "one rank has work: one call forward, one backward"


def test_no_stream_makes_an_empty_entry() -> None:
    for seed in range(40):
        check_in_threads(random_case(np.random.default_rng([61, seed])).plan(), kernel=Strict())
