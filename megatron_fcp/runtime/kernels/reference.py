"""Attention as the formula says, on any device: slow, exact, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_fcp.runtime.kernels.base import Gradients, Kernel, Request, WorkList

MAX_SCORES = 1 << 22  # scores held at once


class Reference(Kernel):
    """Plain softmax attention.

    Parameters
    ----------
    precise : bool
        Compute in float64 whatever the inputs are; else in float32 for inputs below float64.
    """

    def __init__(self, *, precise: bool = False) -> None:
        self.name = "reference-fp64" if precise else "reference"
        self.precise = precise

    def refusal(self, request: Request) -> str | None:
        if not request.dtype.is_floating_point:
            return f"needs a floating-point dtype, not {request.dtype}"
        if self.precise and request.device.type == "mps":
            return "this device has no float64"
        return None

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if self.precise or dtype == torch.float64 else torch.float32

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self._dtype(q.dtype)
        out = torch.empty(work.rows.count, q.shape[1], v.shape[2], dtype=dtype, device=q.device)
        lse = torch.empty(work.rows.count, q.shape[1], dtype=dtype, device=q.device)
        done = 0
        for rows, keys, hidden in _chunks(work, q):
            scores = _scores(q[rows], k[keys], hidden, scale, dtype)
            count = rows.stop - rows.start
            part = torch.logsumexp(scores, dim=-1)  # [kv heads, group, rows]
            shift = part.masked_fill(torch.isneginf(part), 0.0)
            weights = torch.exp(scores - shift.unsqueeze(-1))
            value = torch.einsum("hgqk,khd->qhgd", weights, v[keys].to(dtype))
            out[done : done + count] = value.flatten(1, 2)
            lse[done : done + count] = part.flatten(0, 1).transpose(0, 1)
            done += count
        return out, lse

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
        dtype = self._dtype(q.dtype)
        kv_heads = k.shape[1]
        for rows, keys, hidden in _chunks(work, q):
            scores = _scores(q[rows], k[keys], hidden, scale, dtype)
            total = lse[rows].to(dtype).transpose(0, 1).unflatten(0, (kv_heads, -1))
            weights = torch.exp(scores - total.masked_fill(torch.isneginf(total), 0.0).unsqueeze(-1))
            grad = dout[rows].to(dtype).unflatten(1, (kv_heads, -1))
            into.dv[keys].add_(torch.einsum("hgqk,qhgd->khd", weights, grad))
            delta = (grad * out[rows].to(dtype).unflatten(1, (kv_heads, -1))).sum(-1).permute(1, 2, 0)
            dweights = torch.einsum("qhgd,khd->hgqk", grad, v[keys].to(dtype))
            dscores = weights * (dweights - delta.unsqueeze(-1)) * scale
            into.dq[rows].add_(torch.einsum("hgqk,khd->qhgd", dscores, k[keys].to(dtype)).flatten(1, 2))
            query = q[rows].to(dtype).unflatten(1, (kv_heads, -1))
            into.dk[keys].add_(torch.einsum("hgqk,qhgd->khd", dscores, query))


def _chunks(work: WorkList, q: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """(query rows, KV rows, hidden pairs) of pieces of at most about ``MAX_SCORES`` scores."""
    for q_start, q_stop, kv_start, kv_stop in work.items:
        step = max(1, MAX_SCORES // (q.shape[1] * (kv_stop - kv_start)))
        for start in range(q_start, q_stop, step):
            stop = min(start + step, q_stop)
            low, high = kv_start, kv_stop
            if work.causal:  # bottom-right: the last query sees every key, but for those before its window
                high -= q_stop - stop
                if work.window is not None:
                    low = max(low, kv_start + start - q_start - work.window)
            elif work.anticausal:
                low += start - q_start
            if not work.causal and not work.anticausal:
                yield slice(start, stop), slice(low, high), None
                continue
            # Key that has the number of its query: the query's own in causal work, the first one seen in anticausal.
            row = torch.arange(start - q_start, stop - q_start, device=q.device)[:, None]
            column = torch.arange(low - kv_start, high - kv_start, device=q.device)[None, :]
            hidden = column > row if work.causal else column < row
            if work.window is not None:
                hidden |= column < row - work.window
            yield slice(start, stop), slice(low, high), hidden


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Scaled scores, shape [kv_heads, group, rows, keys]; -inf where hidden."""
    query = q.to(dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", query, k.to(dtype)) * scale
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)
