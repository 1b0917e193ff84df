"""Inputs that are not contiguous, and a hard-coded output dtype.

https://github.com/NVIDIA-NeMo/Automodel/issues/2384, https://github.com/zhuzilin/ring-flash-attention/issues/87
"""

import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.runtime import CompiledPlan, fcp_attention, select_kernel
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

PLAN = make_plan([20, 9], cp_size=2, tokens_per_rank=16, config=FcpConfig(block_size=4))


def attend(comm: Transport, qkv: list[torch.Tensor], dout: torch.Tensor, kernel: str) -> list[torch.Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in qkv)
    chosen, _ = select_kernel(
        kernel, device="cpu", dtype=q.dtype, head_dim_qk=8, head_dim_v=8, num_heads=4, num_kv_heads=2
    )
    out = fcp_attention(q, k, v, plan=CompiledPlan(PLAN.rank_plan(comm.rank)), comm=comm, kernel=chosen)
    out.backward(dout)
    grads = [t.grad for t in (q, k, v)]
    assert [g.dtype for g in grads if g is not None] == [q.dtype, k.dtype, v.dtype]
    assert out.dtype == q.dtype
    return [out.detach(), *(g for g in grads if g is not None)]


def strided(t: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values with other strides."""
    if kind == "heads first":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "head dim first":
        return t.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if kind == "every second column":
        return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]
    assert kind == "part of a mixed QKV"
    return torch.cat([torch.full_like(t, torch.nan), t, torch.full_like(t, torch.nan)], 1)[:, t.shape[1] : -t.shape[1]]


@pytest.mark.parametrize("kernel", ["torch-cpu", "reference"])
@pytest.mark.parametrize("kind", ["heads first", "head dim first", "every second column", "part of a mixed QKV"])
def test_strides_change_nothing(kind: str, kernel: str) -> None:
    g = torch.Generator().manual_seed(3)
    inputs = [[torch.randn(16, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2, 4)] for _ in range(2)]
    plain = run_ranks(2, lambda c: attend(c, inputs[c.rank][:3], inputs[c.rank][3], kernel))
    odd = [[strided(t, kind) for t in rank] for rank in inputs]
    assert not odd[0][0].is_contiguous()
    other = run_ranks(2, lambda c: attend(c, odd[c.rank][:3], odd[c.rank][3], kernel))
    for a, b in zip(plain, other):
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_a_broadcast_gradient() -> None:
    """``out.sum().backward()`` hands a tensor without any stride to backward."""
    g = torch.Generator().manual_seed(3)
    inputs = [[torch.randn(16, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2)] for _ in range(2)]
    flat = torch.ones((), dtype=torch.float64).expand(16, 4, 8)
    expanded = run_ranks(2, lambda c: attend(c, inputs[c.rank], flat, "torch-cpu"))
    full = run_ranks(2, lambda c: attend(c, inputs[c.rank], flat.contiguous(), "torch-cpu"))
    for a, b in zip(expanded, full):
        for x, y in zip(a, b):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes_follow_the_inputs_even_where_keys_are_wider(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    wide = [[torch.randn(16, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2)] for _ in range(2)]
    mixed = [[q.to(dtype), k.to(dtype).double(), v.to(dtype).double()] for q, k, v in wide]
    same = [[t.to(dtype) for t in rank] for rank in wide]
    dout = torch.ones(16, 4, 8, dtype=dtype)
    for a, b in zip(
        run_ranks(2, lambda c: attend(c, mixed[c.rank], dout, "torch-cpu")),
        run_ranks(2, lambda c: attend(c, same[c.rank], dout, "torch-cpu")),
    ):
        assert torch.equal(a[0], b[0])
