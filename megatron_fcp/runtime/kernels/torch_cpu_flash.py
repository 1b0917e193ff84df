"""PyTorch's flash attention for CPUs, which gives and takes the log-sum-exp.

Measured on torch 2.14 (one AMD EPYC core): the 16-bit backward takes 7 to 12 times as long as the float32 one, so
16-bit inputs are computed in float32, which also keeps partial results from being rounded to 16 bits. Folding the heads
of a GQA group into query rows gains nothing. A last dimension that is not contiguous gives wrong results without a
word, so it is copied.
"""

from __future__ import annotations

import torch

from megatron_fcp.runtime.kernels.base import Gradients, Kernel, Request, WorkList

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class TorchCpuFlash(Kernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``, one call per item."""

    name = "torch-cpu"

    def refusal(self, request: Request) -> str | None:
        if request.device.type != "cpu":
            return f"runs on CPU tensors, not on {request.device.type}"
        if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"knows float64, float32, bfloat16 and float16, not {request.dtype}"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim_v = v.shape[2]
        outs, lses = [], []
        for q_start, q_stop, kv_start, kv_stop in work.items:
            q_, k_, v_ = _heads_first(q[q_start:q_stop], k[kv_start:kv_stop], v[kv_start:kv_stop])
            out, lse = _forward(q_, k_, v_, 0.0, work.causal, scale=scale)
            outs.append(out[0].transpose(0, 1)[..., :dim_v])
            lses.append(lse[0].transpose(0, 1))
        if len(outs) == 1:
            return outs[0], lses[0]
        return torch.cat(outs), torch.cat(lses)

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
        dim_qk, dim_v = q.shape[2], v.shape[2]
        for q_start, q_stop, kv_start, kv_stop in work.items:
            rows, keys = slice(q_start, q_stop), slice(kv_start, kv_stop)
            dout_, q_, k_, v_, out_ = _heads_first(dout[rows], q[rows], k[keys], v[keys], out[rows])
            lse_ = lse[rows].transpose(0, 1).unsqueeze(0)
            dq, dk, dv = _backward(dout_, q_, k_, v_, out_, lse_, 0.0, work.causal, scale=scale)
            into.dq[rows].add_(dq[0].transpose(0, 1)[..., :dim_qk])
            into.dk[keys].add_(dk[0].transpose(0, 1)[..., :dim_qk])
            into.dv[keys].add_(dv[0].transpose(0, 1)[..., :dim_v])


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[tokens, heads, dim] -> [1, heads, tokens, dim], at least float32, all padded with zeros to the largest dim.

    The operator wants one head dimension; zeros change neither scores nor the columns that are kept.
    """
    dim = max(t.shape[2] for t in tensors)
    out: list[torch.Tensor] = []
    for t in tensors:
        if t.dtype in (torch.bfloat16, torch.float16):
            t = t.float()
        if t.shape[2] < dim:
            t = torch.nn.functional.pad(t, (0, dim - t.shape[2]))
        elif t.stride(2) != 1:
            t = t.contiguous()
        out.append(t.transpose(0, 1).unsqueeze(0))
    return out
