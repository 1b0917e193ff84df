"""What the GPU tests compute; every function takes the device, and its logic also runs on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.work import StageWork
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass, fcp_attention
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels import Gradients, Kernel, Request, WorkList
from megatron_fcp.runtime.kernels.reference import Reference
from megatron_fcp.runtime.kernels.registry import KERNELS
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.reference import AttentionResult, dense_attention

# bfloat16 has a relative rounding error of 2^-9 (0.2%): one rounding of the output, and a few on the way to a gradient.
KERNEL_LIMITS = {"out": 0.008, "lse": 0.002, "dq": 0.02, "dk": 0.02, "dv": 0.02}
# A whole attention rounds its partial results once more.
STREAM_LIMITS = {"out": 0.01, "dq": 0.03, "dk": 0.03, "dv": 0.03}

Items = list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Heads:
    """Attention heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int


SHAPES = {
    "Llama-3 8B, TP 1": Heads(32, 8, 128, 128),
    "Llama-3 8B, TP 8": Heads(4, 1, 128, 128),
    "Llama-3 70B, TP 1": Heads(64, 8, 128, 128),
    "Llama-3 70B, TP 8": Heads(8, 1, 128, 128),
    "MLA (DeepSeek), TP 8": Heads(16, 16, 192, 128),
    "head dim 64": Heads(8, 8, 64, 64),
}
# (query rows, KV rows, causal, items)
WORK: dict[str, tuple[int, int, bool, Items]] = {
    "documents": (1700, 1700, True, [(0, 1, 0, 1), (1, 78, 1, 78), (100, 612, 100, 612), (700, 1700, 700, 1700)]),
    "blocks": (1500, 2048, False, [(0, 300, 0, 1024), (300, 301, 1024, 1500), (400, 1500, 1500, 2048)]),
    "shared keys": (900, 1200, False, [(0, 200, 0, 512), (200, 333, 0, 1000), (500, 900, 0, 1200)]),
    "long": (4096, 16384, False, [(0, 4096, 0, 16384)]),
    "window": (1700, 1700, True, [(0, 1, 0, 1), (1, 78, 1, 78), (100, 612, 100, 612), (700, 1700, 700, 1700)]),
    "edge of a window": (1500, 2048, False, [(0, 300, 0, 300), (300, 301, 300, 1024), (400, 1500, 600, 2048)]),
}
# What sets the mask of some of them apart.
MASKS: dict[str, dict[str, Any]] = {"window": {"window": 200}, "edge of a window": {"anticausal": True}}


def adapters(heads: Heads, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Kernel | str]:
    """Every GPU adapter, or the reason why it cannot do these heads here."""
    request = Request(device, dtype, heads.head_dim_qk, heads.head_dim_v, heads.num_heads, heads.num_kv_heads)
    return {k.name: k.refusal(request) or k for k in KERNELS if not k.name.startswith(("reference", "torch-cpu"))}


def work_list(items: Items, causal: bool, kv_tokens: int, device: torch.device, **mask: Any) -> WorkList:
    """A work list of one stage; ``mask`` as in :data:`MASKS`."""
    none = frozen(np.zeros(0, dtype=np.int64))
    q_start, q_stop, kv_start, kv_stop = (frozen(column) for column in zip(*items))
    stage = StageWork(q_start, q_stop, kv_start, kv_stop, causal, kv_tokens, none, none, **mask)
    return WorkList.from_stage(stage, device)


def kernel_errors(
    kernel: Kernel, heads: Heads, work: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Root-mean-square error of out, lse, dq, dk and dv over that of the float64 formula on the same inputs.

    NaN fills whatever no item owns, before and after: it must neither be read nor left behind.
    """
    num_q, num_kv, causal, items = WORK[work]
    listed = work_list(items, causal, num_kv, device, **MASKS.get(work, {}))
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        (num_q, heads.num_heads, heads.head_dim_qk),
        (num_kv, heads.num_kv_heads, heads.head_dim_qk),
        (num_kv, heads.num_kv_heads, heads.head_dim_v),
        (num_q, heads.num_heads, heads.head_dim_v),
    )
    q, k, v, dout = (torch.empty(s, dtype=dtype, device=device).normal_(generator=generator) for s in sizes)
    for tensor, start in ((q, 0), (dout, 0), (k, 2), (v, 2)):
        owned = torch.zeros(len(tensor), dtype=torch.bool, device=device)
        for item in items:
            owned[item[start] : item[start + 1]] = True
        tensor[~owned] = torch.nan
    scale = heads.head_dim_qk**-0.5
    exact = Reference(precise=True)
    want_out, want_lse = exact.forward(q, k, v, listed, scale)
    whole_out = torch.full(dout.shape, torch.nan, dtype=torch.float64, device=device)
    whole_lse = torch.full(dout.shape[:2], torch.nan, dtype=torch.float64, device=device)
    listed.rows.put(whole_out, want_out)
    listed.rows.put(whole_lse, want_lse)
    out, lse = kernel.forward(q, k, v, listed, scale)
    got, want = (
        Gradients(*(torch.zeros(t.shape, dtype=d, device=device) for t in (q, k, v)))
        for d in (torch.float32, torch.float64)
    )
    exact.backward(dout, q, k, v, whole_out, whole_lse, listed, scale, want)
    kernel.backward(dout, q, k, v, whole_out.to(dtype), whole_lse.float(), listed, scale, got)
    pairs = {
        "out": (out, want_out), "lse": (lse, want_lse), "dq": (got.dq, want.dq), "dk": (got.dk, want.dk),
        "dv": (got.dv, want.dv),
    }  # fmt: skip
    return {
        name: float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        for name, (a, b) in pairs.items()
    }


STREAM = [5000, 30, 1, 640, 900, 77, 1000]


def stream_plan(cp_size: int) -> Plan:
    """A plan with one long document and many short ones, several stages on each rank."""
    return make_plan(
        STREAM, cp_size=cp_size, tokens_per_rank=8192 // cp_size, config=FcpConfig(block_size=128, rounds_per_stage=1)
    )


def stream_inputs(plan: Plan, heads: Heads, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout of the whole stream, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((heads.num_heads, heads.head_dim_qk), (heads.num_kv_heads, heads.head_dim_qk))
    sizes += ((heads.num_kv_heads, heads.head_dim_v), (heads.num_heads, heads.head_dim_v))
    padding = torch.from_numpy(plan.table.token_documents() < 0)
    out = [torch.randn(plan.table.num_tokens, *s, generator=generator).to(dtype) for s in sizes]
    for tensor in out:
        tensor[padding] = torch.nan
    return out


def attend(
    comm: Transport,
    plan: Plan,
    inputs: list[torch.Tensor],
    kernel: Kernel,
    device: torch.device,
    *,
    autograd: bool = True,
) -> list[torch.Tensor]:
    """Forward and backward of one rank: its tokens, out, dq, dk, dv, on the CPU.

    ``autograd`` False calls the passes themselves: autograd runs all backward passes of a GPU in one thread, where
    ranks that are threads would wait for each other.
    """
    compiled = CompiledPlan(plan.rank_plan(comm.rank), device)
    tokens = torch.from_numpy(compiled.rank_plan.local_token_global_indices.copy())
    q, k, v, dout = (t[tokens].to(device) for t in inputs)
    if autograd:
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = fcp_attention(*leaves, plan=compiled, comm=comm, kernel=kernel)
        grads = torch.autograd.grad(out, leaves, dout)
    else:
        scale = q.shape[2] ** -0.5
        out, lse = ForwardPass(q, k, v, compiled, comm, kernel, scale).run()
        grads = BackwardPass(dout, q, k, v, out, lse, compiled, comm, kernel, scale).run()
    return [tokens, *(t.detach().cpu() for t in (out, *grads))]


def stream_errors(plan: Plan, inputs: list[torch.Tensor], results: list[list[torch.Tensor]]) -> dict[str, float]:
    """Root-mean-square error of a whole stream's out, dq, dk and dv over dense float64 attention's."""
    q, k, v, dout = inputs
    table = plan.table
    want: AttentionResult = dense_attention(
        q, k, v, dout, starts=table.document_start.tolist(), lengths=table.document_length.tolist()
    )
    errors: dict[str, float] = {}
    for i, (name, exact) in enumerate(zip(("out", "dq", "dk", "dv"), want.tensors()), start=1):
        got = torch.full_like(exact, torch.nan)
        for result in results:
            got[result[0]] = result[i].double()
        errors[name] = float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    return errors
