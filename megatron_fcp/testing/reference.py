"""The right answer: dense attention of every document in one process, float64, gradients by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fcp.config import Mask


@dataclass(frozen=True)
class AttentionResult:
    """Output and gradients over the whole stream, float64, exactly 0 on padding.

    Attributes
    ----------
    out : Tensor, shape [num_tokens, num_heads, head_dim_v]
    dq : Tensor, shape [num_tokens, num_heads, head_dim_qk]
    dk : Tensor, shape [num_tokens, num_kv_heads, head_dim_qk]
    dv : Tensor, shape [num_tokens, num_kv_heads, head_dim_v]
    dsink : Tensor or None, shape [num_heads]
    """

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, dq, dk, dv)."""
        return self.out, self.dq, self.dk, self.dv


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    starts: Sequence[int],
    lengths: Sequence[int],
    mask: Mask = "causal",
    scale: float | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> AttentionResult:
    """Attention inside each document ``starts[i] : starts[i] + lengths[i]`` of a packed stream.

    Parameters
    ----------
    q : Tensor, shape [num_tokens, num_heads, head_dim_qk]
    k : Tensor, shape [num_tokens, num_kv_heads, head_dim_qk]
    v : Tensor, shape [num_tokens, num_kv_heads, head_dim_v]
    dout : Tensor, shape [num_tokens, num_heads, head_dim_v]
    starts, lengths : sequence of int
    mask : {"causal", "full"}
    scale : float, optional
        Default ``head_dim_qk ** -0.5``.
    window : int, optional
        Keys before its own that a causal query sees at most.
    sink : Tensor, optional, shape [num_heads]
        Logit of one more key, whose value is zero.
    """
    group = q.shape[1] // k.shape[1]
    factor = float(q.shape[2]) ** -0.5 if scale is None else scale
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    grads = [torch.zeros(t.shape, dtype=torch.float64) for t in (q, k, v)]
    logit = torch.full((q.shape[1],), -torch.inf) if sink is None else sink.detach()
    logit = logit.double().requires_grad_()
    dsink = torch.zeros_like(logit)
    for start, length in zip(starts, lengths):
        rows = slice(start, start + length)
        leaves = [t[rows].detach().double().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            key, value = (t.repeat_interleave(group, dim=1) for t in leaves[1:])
            scores = torch.einsum("qhd,khd->hqk", leaves[0], key) * factor
            if mask == "causal":
                every = torch.ones(length, length, dtype=torch.bool)
                hidden = every.triu(1) if window is None else every.triu(1) | every.tril(-window - 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            scores = torch.cat([scores, logit.view(-1, 1, 1).expand(-1, length, 1)], dim=-1)
            document = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], value)
        out[rows] = document.detach()
        *parts, lost = torch.autograd.grad(document, [*leaves, logit], dout[rows].double())
        dsink += lost
        for grad, part in zip(grads, parts):
            grad[rows] = part
    return AttentionResult(out, *grads, dsink=None if sink is None else dsink)
