"""FlashAttention 4, written in CuTe DSL: the ``flash-attn-4`` package, module ``flash_attn.cute``.

Contract, read from ``flash_attn/cute/interface.py`` of the releases named below; not yet run on a GPU.

==================== ==================================================================================================
q, k, v              [tokens, heads, head_dim], last dimension contiguous, other strides free
LSE                  [heads, tokens] float32, natural logarithm of the scaled scores; only with ``return_lse=True``
causal               bottom-right aligned
boundaries           ``cu_seqlens``; packed rows only, so ``seqused`` stays unused
head dims            multiples of 8; capability 9: up to 256, here up to 192; 10 and 11: up to 128, or 192/128
GQA                  native
window, sink         ``window_size_left`` and ``_right``, None for none; a learnable sink, which is not used here
determinism          forward always (``num_splits=1``); backward with ``deterministic=True``, which is always passed
dq, dk, dv           returned, in the dtype of q, every row of the packed ranges
other rows           none are touched
first call           compiles a kernel for the dtype, head dims and mask: seconds
==================== ==================================================================================================
"""

from __future__ import annotations

import torch

from megatron_fcp.runtime.kernels.base import Request
from megatron_fcp.runtime.kernels.packages import Package, PackagedKernel, refuse_dims, refuse_names
from megatron_fcp.runtime.kernels.varlen import Call, heads_first

_BOTH = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")
_BOTH += ("window_size_left", "window_size_right")


class FlashAttention4(PackagedKernel):
    """``_flash_attn_fwd`` and ``_flash_attn_bwd`` of ``flash_attn.cute.interface``."""

    name = "flash-attn-4"
    distribution = "flash-attn-4"
    oldest, newest = "4.0.0b10", "4.0.0b36"

    def load(self) -> Package:
        import importlib.metadata

        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

        version = importlib.metadata.version(self.distribution)
        return Package(version, interface._flash_attn_fwd, interface._flash_attn_bwd)

    def refuse_shape(self, request: Request, capability: tuple[int, int]) -> str | None:
        if capability[0] not in (9, 10, 11):
            return f"needs compute capability 9, 10 or 11, not {capability[0]}.{capability[1]}"
        dims = request.head_dim_qk, request.head_dim_v
        if capability[0] == 9 or dims == (192, 128):
            return refuse_dims(request, 192)
        return refuse_dims(request, 128)

    def refuse_package(self, package: Package) -> str | None:
        return refuse_names(package, (*_BOTH, "return_lse", "num_splits"), (*_BOTH, "lse", "deterministic"))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self.package.forward(
            q=q,
            k=k,
            v=v,
            **call.lengths,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=call.window,
            window_size_right=None if call.window is None else 0,
            num_splits=1,
            return_lse=True,
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
        dq, dk, dv, *_ = self.package.backward(
            q=q,
            k=k,
            v=v,
            out=out,
            dout=dout,
            lse=heads_first(lse),
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=call.window,
            window_size_right=None if call.window is None else 0,
            **call.lengths,
            deterministic=True,
        )
        return dq, dk, dv
