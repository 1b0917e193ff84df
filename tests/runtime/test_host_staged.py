"""The transport that GPU tests use for two ranks on one device, here with tensors of the CPU."""

from __future__ import annotations

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, gather, largest_errors, random_inputs, right_answer, run_rank
from megatron_fcp.testing.host_staged import HostStagedTransport
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("mode", ["rendezvous", "eager"])
def test_attention_over_the_staged_transport(mode: str) -> None:
    plan = make_plan([70, 3, 1, 40], cp_size=3, tokens_per_rank=40, config=FcpConfig(block_size=8))
    model = Model()
    x = random_inputs(plan, model, 1)
    want = right_answer(plan, model, x)
    results = run_ranks(3, lambda comm: run_rank(HostStagedTransport(comm), plan, model, x), mode=mode)  # type: ignore[arg-type]
    for name, error in largest_errors(plan, gather(results, want), want).items():
        assert error < 1e-12, (name, error)
