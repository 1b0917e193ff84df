"""Every kernel adapter that is there against float64, over the shapes of real models. Not yet run on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_fcp.runtime.kernels import Gradients, Kernel
from megatron_fcp.testing.gpu_checks import KERNEL_LIMITS, SHAPES, WORK, adapters, kernel_errors, work_list

pytestmark = pytest.mark.gpu

ADAPTERS = (
    "transformer-engine",
    "transformer-engine-fast",
    "flash-attn-4",
    "flash-attn-3",
    "flash-attn-2",
    "torch-cuda",
)


def the(adapter: str, shape: str) -> Kernel:
    kernel = adapters(SHAPES[shape], torch.device("cuda"))[adapter]
    if isinstance(kernel, str):
        pytest.skip(f"{adapter}: {kernel}")
    return kernel


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_against_float64(adapter: str, shape: str, work: str) -> None:
    errors = kernel_errors(the(adapter, shape), SHAPES[shape], work, torch.device("cuda"))
    for name, error in errors.items():
        assert error < KERNEL_LIMITS[name], errors  # also false for NaN


def test_torch_is_always_there() -> None:
    for shape in SHAPES:
        assert isinstance(the("torch-cuda", shape), Kernel)


@pytest.mark.parametrize("adapter", [a for a in ADAPTERS if a != "transformer-engine-fast"])
def test_same_bits_in_every_run(adapter: str) -> None:
    kernel, device = the(adapter, "Llama-3 8B, TP 8"), torch.device("cuda")
    heads = SHAPES["Llama-3 8B, TP 8"]
    num_q, num_kv, causal, items = WORK["shared keys"]
    work = work_list(items, causal, num_kv, device)
    q = torch.randn(num_q, heads.num_heads, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(num_kv, heads.num_kv_heads, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    runs = []
    for _ in range(5):
        out, lse = kernel.forward(q, k, v, work, 0.1)
        whole = torch.zeros_like(q), torch.zeros(q.shape[:2], device=device)
        work.rows.put(whole[0], out)
        work.rows.put(whole[1], lse)
        into = Gradients(*(torch.zeros(t.shape, device=device) for t in (q, k, v)))
        kernel.backward(torch.ones_like(q), q, k, v, *whole, work, 0.1, into)
        runs.append((out.clone(), lse.clone(), into.dq, into.dk, into.dv))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
