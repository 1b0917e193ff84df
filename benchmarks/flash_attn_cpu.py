"""A CPU stand-in for the functions of flash_attn that ring-flash-attn calls: PyTorch's flash kernel, one document each.

ring-flash-attn imports them by name from ``flash_attn.flash_attn_interface``; :func:`install` puts modules of these
names in place. All contenders of the benchmark thus run the same kernel.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward_op(*tensors: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q, k and v, each of shape [1, heads, tokens, head_dim]; computed in float32 like all contenders."""
    out, lse = _forward(*(t.float() for t in tensors), 0.0, causal, scale=scale)
    return out.to(tensors[0].dtype), lse


def backward_op(*tensors: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) in float32, of dout, q, k, v and out."""
    return _backward(*(t.float() for t in tensors), lse, 0.0, causal, scale=scale)


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).unsqueeze(0)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """(out, lse of shape [num_heads, num_tokens], unused, unused), as flash_attn 2.7 and newer."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for (a, b), (c, d) in _pairs(cu_seqlens_q, cu_seqlens_k):
        o, s = forward_op(*map(_heads_first, (q[a:b], k[c:d], v[c:d])), causal=causal, scale=softmax_scale)
        out[a:b] = o[0].transpose(0, 1)
        lse[:, a:b] = s[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """Fill ``dq``, ``dk`` and ``dv``."""
    for (a, b), (c, d) in _pairs(cu_seqlens_q, cu_seqlens_k):
        gradients = backward_op(
            *map(_heads_first, (dout[a:b], q[a:b], k[c:d], v[c:d], out[a:b])),
            lse=softmax_lse[:, a:b].unsqueeze(0), causal=causal, scale=softmax_scale,
        )  # fmt: skip
        for into, rows, gradient in zip((dq, dk, dv), ((a, b), (c, d), (c, d)), gradients):
            into[slice(*rows)] = gradient[0].transpose(0, 1)


def _pairs(q: torch.Tensor, k: torch.Tensor) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    pairs = zip(itertools.pairwise(q.tolist()), itertools.pairwise(k.tolist()))
    return [(x, y) for x, y in pairs if x[0] < x[1] and y[0] < y[1]]


def _not_here(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the stand-in has the variable-length functions only")


def install() -> None:
    """Make ``flash_attn`` importable unless the real one is, and ring_flash_attn without Hugging Face's transformers.

    The package imports its adapters for transformers at once; they have no part in this.
    """
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = _not_here  # type: ignore[attr-defined]
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        interface = types.ModuleType("flash_attn.flash_attn_interface")
        package = types.ModuleType("flash_attn")
        interface._flash_attn_varlen_forward = _flash_attn_varlen_forward  # type: ignore[attr-defined]
        interface._flash_attn_varlen_backward = _flash_attn_varlen_backward  # type: ignore[attr-defined]
        interface._flash_attn_forward = interface._flash_attn_backward = _not_here  # type: ignore[attr-defined]
        package.flash_attn_interface = interface  # type: ignore[attr-defined]
        package.flash_attn_func = package.flash_attn_varlen_func = _not_here  # type: ignore[attr-defined]
        sys.modules["flash_attn"], sys.modules["flash_attn.flash_attn_interface"] = package, interface
