"""PyTorch's flash attention for CPUs, which gives and takes the log-sum-exp.

Measured on torch 2.14 (one AMD EPYC core): the 16-bit backward takes 7 to 12 times as long as the float32 one, so
16-bit inputs are computed in float32, which also keeps partial results from being rounded to 16 bits. Folding the heads
of a GQA group into query rows gains nothing. A last dimension that is not contiguous gives wrong results without a
word, so it is copied. The operator knows no window, but takes a mask: work at the edge of a window is cut into strips
of queries, each with the keys that one of them sees and a mask of that size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_fcp.runtime.kernels.base import Gradients, Kernel, Request, WorkList

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LEAST_STRIP, MOST_STRIP = 64, 256  # queries; a strip of a window's width would do twice the work
MAX_MASK = 1 << 22  # entries
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
        for rows, keys, edge in _strips(work):
            q_, k_, v_ = _heads_first(q[rows], k[keys], v[keys])
            mask, causal = _mask(edge, rows, keys, work, q_), work.causal and edge is None
            out, lse = _forward(q_, k_, v_, 0.0, causal, attn_mask=mask, scale=scale)
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
        for rows, keys, edge in _strips(work):
            dout_, q_, k_, v_, out_ = _heads_first(dout[rows], q[rows], k[keys], v[keys], out[rows])
            lse_ = lse[rows].transpose(0, 1).unsqueeze(0)
            mask, causal = _mask(edge, rows, keys, work, q_), work.causal and edge is None
            dq, dk, dv = _backward(dout_, q_, k_, v_, out_, lse_, 0.0, causal, attn_mask=mask, scale=scale)
            into.dq[rows].add_(dq[0].transpose(0, 1)[..., :dim_qk])
            into.dk[keys].add_(dk[0].transpose(0, 1)[..., :dim_qk])
            into.dv[keys].add_(dv[0].transpose(0, 1)[..., :dim_v])


def _strips(work: WorkList) -> Iterator[tuple[slice, slice, int | None]]:
    """(query rows, KV rows, edge): whole items without a mask of their own (None), and strips at the edge of a window.

    The edge is the KV row, counted from the first of the strip, that the strip's first query sees first; negative where
    the window reaches further back than the keys.
    """
    for q_start, q_stop, kv_start, kv_stop in work.items:
        count = q_stop - q_start
        if not work.anticausal and (work.window is None or count <= work.window + 1):
            yield slice(q_start, q_stop), slice(kv_start, kv_stop), None
            continue
        window = kv_stop - kv_start if work.window is None else work.window
        step = max(1, min(MOST_STRIP, max(LEAST_STRIP, window // 2), MAX_MASK // (kv_stop - kv_start)))
        for i in range(0, count, step):
            j = min(i + step, count)
            if work.anticausal:
                yield slice(q_start + i, q_start + j), slice(kv_start + i, kv_stop), 0
            else:
                low = max(i - window, 0)
                yield slice(q_start + i, q_start + j), slice(kv_start + low, kv_start + j), i - window - low


def _mask(edge: int | None, rows: slice, keys: slice, work: WorkList, like: torch.Tensor) -> torch.Tensor | None:
    """What to add to the scores of a strip, shape [rows, keys]: -inf outside the window."""
    if edge is None:
        return None
    column = torch.arange(keys.stop - keys.start)[None, :] - torch.arange(edge, edge + rows.stop - rows.start)[:, None]
    hidden = column < 0
    if work.window is not None:
        hidden |= column > work.window
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


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
