"""16-bit and fp32: at most twice the error of the kernel on one rank, whatever the blocks and ranks."""

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.runtime.kernels import Gradients, Kernel, Request, WorkList
from megatron_fcp.runtime.kernels.torch_cpu_flash import TorchCpuFlash
from megatron_fcp.testing.attention_check import (
    NAMES,
    Model,
    gather,
    largest_errors,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

FACTOR = 2.0
LENGTHS = [700, 3, 150, 64, 1, 90]
STREAM = 1024


class SixteenBitPartials(Kernel):
    """Rounds whatever a kernel returns to the inputs' dtype, as variable-length GPU kernels do."""

    name = "rounded"

    def __init__(self) -> None:
        self._kernel = TorchCpuFlash()

    def refusal(self, request: Request) -> str | None:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._kernel.forward(q, k, v, work, scale)
        return out.to(q.dtype), lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: WorkList,
        scale: float,
        into: Gradients,
    ) -> None:
        parts = Gradients(*(torch.zeros_like(t) for t in (into.dq, into.dk, into.dv)))
        self._kernel.backward(dout, q, k, v, out, lse, work, scale, parts)
        for total, part in ((into.dq, parts.dq), (into.dk, parts.dk), (into.dv, parts.dv)):
            total += part.to(q.dtype)


def plan_for(cp_size: int, block_size: int) -> Plan:
    config = FcpConfig(block_size=block_size, rounds_per_stage=1)
    return make_plan(LENGTHS, cp_size=cp_size, tokens_per_rank=STREAM // cp_size, config=config)


def errors(cp_size: int, block_size: int, model: Model, kernel: Kernel) -> dict[str, float]:
    plan = plan_for(cp_size, block_size)
    x = random_inputs(plan, model, 5)
    want = right_answer(plan, model, x)
    got = run_ranks(cp_size, lambda comm: run_rank(comm, plan, model, x, kernel), mode="eager")
    return largest_errors(plan, gather(got, want), want)


def native_16_bit_errors(model: Model) -> dict[str, float]:
    """PyTorch's own flash attention in the model's dtype, one call per document."""
    plan = plan_for(1, STREAM)
    x = random_inputs(plan, model, 5)
    want = right_answer(plan, model, x)
    got = [torch.zeros(w.shape, dtype=torch.float64) for w in want.tensors()]
    for start, length in zip(plan.table.document_start.tolist(), plan.table.document_length.tolist()):
        rows = slice(start, start + length)
        q, k, v, dout = (t[rows].transpose(0, 1).unsqueeze(0) for t in (x.q, x.k, x.v, x.dout))
        ops = torch.ops.aten
        scale = model.head_dim_qk**-0.5
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, True, scale=scale
        )
        for whole, part in zip(got, (out, *grads)):
            whole[rows] = part[0].transpose(0, 1).double()
    return {name: float((g - w).abs().max()) for name, g, w in zip(NAMES, got, want.tensors())}


@pytest.mark.parametrize(("cp_size", "block_size"), [(2, 64), (4, 16), (8, 16), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_error_against_fp64_is_at_most_twice_that_of_one_rank(
    dtype: torch.dtype, cp_size: int, block_size: int
) -> None:
    model = Model(dtype=dtype)
    one = errors(1, STREAM, model, model.select())
    many = errors(cp_size, block_size, model, model.select())
    for name in NAMES:
        assert many[name] <= FACTOR * one[name], (name, many, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_even_16_bit_partials_stay_within_twice_the_native_kernel(dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    native = native_16_bit_errors(model)
    for cp_size, block_size in ((2, 64), (8, 16)):
        many = errors(cp_size, block_size, model, SixteenBitPartials())
        for name in NAMES:
            assert many[name] <= FACTOR * native[name], (name, many, native)


def test_large_logits_in_every_dtype() -> None:
    """Scores up to about +-80: nothing overflows, and the bound holds all the same."""
    for dtype in (torch.bfloat16, torch.float32):
        model = Model(dtype=dtype, spread=20.0)
        one = errors(1, STREAM, model, model.select())
        many = errors(4, 16, model, model.select())
        assert np.isfinite(list(many.values())).all()
        for name in NAMES:
            assert many[name] <= FACTOR * one[name], (dtype, name, many, one)
