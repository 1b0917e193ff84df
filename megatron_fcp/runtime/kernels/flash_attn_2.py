"""FlashAttention 2: the ``flash-attn`` package (https://github.com/Dao-AILab/flash-attention).

Contract, read from ``flash_attn/flash_attn_interface.py`` and ``csrc/flash_attn/flash_api.cpp`` of the releases named
below; not yet run on a GPU.

==================== ==================================================================================================
q, k, v              [tokens, heads, head_dim], last dimension contiguous, other strides free
LSE                  [heads, tokens] float32, natural logarithm of the scaled scores (from 2.6 on; before, padded)
causal               bottom-right aligned
boundaries           ``cu_seqlens``; packed rows only, so no padded rows exist
head dims            one for q, k and v, multiple of 8, at most 256: V or Q and K get zero columns where they differ
GQA                  native; the backward sums expanded dK and dV inside
window, sink         ``window_size_left`` and ``_right``, -1 for none; no sink
determinism          forward always; backward with ``deterministic=True``, which is always passed
dq, dk, dv           written into tensors given, in the dtype of q, every row of the packed ranges
other rows           none are touched
==================== ==================================================================================================
"""

from __future__ import annotations

import torch

from megatron_fcp.runtime.kernels.base import Request
from megatron_fcp.runtime.kernels.packages import Package, PackagedKernel, refuse_dims, refuse_names
from megatron_fcp.runtime.kernels.varlen import Call, heads_first, unwritten

_FORWARD = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "softmax_scale", "window_size_left", "window_size_right")
_BACKWARD = (*_FORWARD, "softmax_lse", "dq", "dk", "dv", "alibi_slopes", "deterministic", "rng_state")


class FlashAttention2(PackagedKernel):
    """``_flash_attn_varlen_forward`` and ``_flash_attn_varlen_backward``."""

    name = "flash-attn-2"
    distribution = "flash-attn"
    oldest, newest = "2.7.0.post2", "2.8.3.post2"

    def load(self) -> Package:
        import flash_attn  # pyright: ignore[reportMissingImports]
        from flash_attn import flash_attn_interface as interface  # pyright: ignore[reportMissingImports]

        return Package(
            flash_attn.__version__, interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward
        )

    def refuse_shape(self, request: Request, capability: tuple[int, int]) -> str | None:
        if capability < (8, 0):
            return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
        return refuse_dims(request, 256)

    def refuse_package(self, package: Package) -> str | None:
        return refuse_names(package, _FORWARD, _BACKWARD)

    def padded_dims(self, dim_qk: int, dim_v: int) -> tuple[int, int]:
        return max(dim_qk, dim_v), max(dim_qk, dim_v)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self.package.forward(
            q=q,
            k=k,
            v=v,
            **call.lengths,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=call.window_size[0],
            window_size_right=call.window_size[1],
        )
        return out, lse.transpose(0, 1)

    def differentiate(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = unwritten(q, k, v)
        self.package.backward(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=heads_first(lse),
            dq=dq,
            dk=dk,
            dv=dv,
            **call.lengths,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=call.window_size[0],
            window_size_right=call.window_size[1],
            softcap=0.0,
            alibi_slopes=None,
            deterministic=True,
            rng_state=None,
        )
        return dq, dk, dv
