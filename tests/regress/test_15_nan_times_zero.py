"""NaN times 0, and uninitialised rows behind the real tokens, poison weight gradients.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3117, https://github.com/NVIDIA/TransformerEngine/issues/3205
"""

import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.runtime import CompiledPlan, fcp_attention
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.attention_check import Model
from megatron_fcp.testing.reference import dense_attention
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

MODEL = Model(num_heads=2, num_kv_heads=2)
HIDDEN = 6


def weight_gradients(comm: Transport, plan: Plan, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One rank's gradient of the QKV projection; memory that nobody wrote is NaN (see conftest)."""
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    tokens = torch.from_numpy(compiled.rank_plan.local_token_global_indices.copy())
    weight = weight.clone().requires_grad_()
    q, k, v = (hidden[tokens] @ weight).unflatten(1, (3, 2, 8)).unbind(1)
    out = fcp_attention(q, k, v, plan=compiled, comm=comm, kernel=MODEL.select())
    out.square().sum().backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("documents", [[13, 5], [1], [], [40]], ids=str)
def test_weight_gradients_are_those_of_the_real_tokens(documents: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(48, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(HIDDEN, 48, generator=g, dtype=torch.float64)
    plan = make_plan(documents, cp_size=3, tokens_per_rank=16, config=FcpConfig(block_size=4))
    got = sum(run_ranks(3, lambda comm: weight_gradients(comm, plan, hidden, weight)))
    starts, lengths = plan.table.document_start.tolist(), plan.table.document_length.tolist()
    q, k, v = (hidden @ weight).unflatten(1, (3, 2, 8)).unbind(1)
    out = dense_attention(q, k, v, torch.zeros_like(q), starts=starts, lengths=lengths).out
    want = dense_attention(q, k, v, 2 * out, starts=starts, lengths=lengths)
    grad = torch.stack([want.dq, want.dk, want.dv], 1).flatten(1)
    torch.testing.assert_close(got, hidden.T @ grad, rtol=0, atol=1e-11)
