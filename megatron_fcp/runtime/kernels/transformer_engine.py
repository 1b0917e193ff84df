"""Transformer Engine's fused attention, which is cuDNN's (https://github.com/NVIDIA/TransformerEngine).

Contract, read from ``transformer_engine/pytorch/cpp_extensions/fused_attn.py`` of the releases named below and from
``common/fused_attn/`` of the repository; not yet run on a GPU.

==================== ==================================================================================================
q, k, v              ``thd_thd_thd``: three contiguous tensors [tokens, heads, head_dim]
LSE                  first auxiliary tensor, [tokens, heads, 1] float32, natural logarithm of the scaled scores (from
                     cuDNN 9.6 on, not on compute capability 12.0); the backward takes it in the same layout
causal               ``padding_causal`` is top-left aligned, which is the same on squares, and all other causal work is
                     ``padding_causal_bottom_right`` (cuDNN 9.7 for any lengths)
boundaries           ``cu_seqlens`` give lengths and ``cu_seqlens_padded`` offsets, which cuDNN needs even where both
                     are equal, as here: rows are packed
head dims            multiples of 8 up to 128; capability 9: up to 256 where q/k and v agree; 192/128 from 9.0 on
GQA                  native (cuDNN 9.6)
window, sink         ``window_size``, (-1, -1) for none, (left, 0) on packed sequences from cuDNN 9.6 on but for 9.14.0;
                     the sink (``softmax_offset``) is not used here
determinism          forward always; backward with ``deterministic=True``: capability 10 needs cuDNN 9.18.1, and on
                     capability 9 cuDNN asks for about 128 B x batch x heads x tokens^2 of workspace (comment in
                     ``dot_product_attention/utils.py``), so there only ``transformer-engine-fast`` is usable
dq, dk, dv           returned, in the dtype of q, every row of the packed ranges
other rows           none are touched
first call           builds a cuDNN graph per power-of-two bucket of tokens and sequences
==================== ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.runtime.kernels.base import Request
from megatron_fcp.runtime.kernels.packages import Package, PackagedKernel, parameters, refuse_dims, refuse_names
from megatron_fcp.runtime.kernels.varlen import Call

_BOTH = (
    *("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("fake_dtype", "fused_attention_backend", "attn_scale", "dropout", "qkv_layout", "attn_mask_type", "window_size"),
)


class TransformerEngine(PackagedKernel):
    """``fused_attn_fwd`` and ``fused_attn_bwd``.

    Parameters
    ----------
    package : Package, optional
    deterministic : bool
        False lets cuDNN sum dQ in any order; never chosen by "auto".
    """

    distribution = "transformer-engine"
    oldest, newest = "2.9.0", "2.20.2"

    def __init__(self, package: Package | None = None, *, deterministic: bool = True) -> None:
        super().__init__(package)
        self.deterministic = deterministic
        self.name = "transformer-engine" if deterministic else "transformer-engine-fast"

    def load(self) -> Package:
        import importlib.metadata

        from transformer_engine.pytorch.constants import TE_DType  # pyright: ignore[reportMissingImports]
        from transformer_engine.pytorch.cpp_extensions import fused_attn  # pyright: ignore[reportMissingImports]

        constants = {"backend": fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"], "dtypes": TE_DType}
        version = importlib.metadata.version("transformer-engine")
        return Package(version, fused_attn.fused_attn_fwd, fused_attn.fused_attn_bwd, constants)

    def refuse_shape(self, request: Request, capability: tuple[int, int]) -> str | None:
        if not (9, 0) <= capability < (12, 0):
            return f"packed sequences need compute capability 9 to 11, not {capability[0]}.{capability[1]}"
        if self.deterministic and capability[0] == 9:
            return (
                "cuDNN's deterministic backward of packed sequences needs workspace quadratic in the tokens on compute "
                "capability 9; --fcp-kernel transformer-engine-fast does without determinism"
            )
        cudnn = torch.backends.cudnn.version() or 0
        needed = 90600 if capability[0] == 9 else 91801 if self.deterministic else 91100
        if cudnn < needed or cudnn in (91000, 91001):
            return f"needs cuDNN {needed} or later, and not 91000 or 91001; this is {cudnn}"
        if request.window and (cudnn < 90700 or cudnn == 91400):
            return f"windows on packed sequences need cuDNN 90700 or later, and not 91400; this is {cudnn}"
        dims = request.head_dim_qk, request.head_dim_v
        if dims == (192, 128) or (capability[0] == 9 and dims[0] == dims[1]):
            return refuse_dims(request, 256)
        return refuse_dims(request, 128)

    def refuse_package(self, package: Package) -> str | None:
        return refuse_names(package, ("is_training", *_BOTH), (*_BOTH, "aux_ctx_tensors", "deterministic"))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        forward = self.package.forward
        arguments = self._common(q, call, scale) | _known(forward, o_format="thd")
        out, auxiliary, *_ = forward(is_training=True, q=q, k=k, v=v, **arguments)
        lse = auxiliary[0]
        assert lse.shape == (*q.shape[:2], 1), f"packed LSE expected, got {tuple(lse.shape)} for q {tuple(q.shape)}"
        return out.view(*q.shape[:2], v.shape[2]), lse.squeeze(2)

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
        q, k, v, out, dout = (t.contiguous() for t in (q, k, v, out, dout))
        backward = self.package.backward
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)  # state of a generator that is not used
        arguments = self._common(q, call, scale)
        arguments["aux_ctx_tensors"] = [lse.contiguous().unsqueeze(2), no_dropout]
        arguments["deterministic"] = self.deterministic
        arguments |= _known(backward, o_format="thd", do_format="thd", dqkv_layout="thd_thd_thd")
        if "dqkv_dtype" in parameters(backward).parameters:
            arguments["dqkv_dtype"] = self.package.constants["dtypes"][q.dtype]
        dq, dk, dv, *_ = backward(q=q, k=k, v=v, o=out, d_o=dout, **arguments)
        return dq, dk, dv

    def _common(self, q: torch.Tensor, call: Call, scale: float) -> dict[str, Any]:
        return {
            "max_seqlen_q": call.max_seqlen_q,
            "max_seqlen_kv": call.max_seqlen_kv,
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_kv": call.cu_seqlens_kv,
            "cu_seqlens_q_padded": call.cu_seqlens_q,
            "cu_seqlens_kv_padded": call.cu_seqlens_kv,
            "fake_dtype": q.dtype,
            "fused_attention_backend": self.package.constants["backend"],
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": "thd_thd_thd",
            "attn_mask_type": _mask_type(call),
            "window_size": call.window_size,
        }


def _mask_type(call: Call) -> str:
    if not call.causal:
        return "padding"
    return "padding_causal" if call.square else "padding_causal_bottom_right"


def _known(function: Callable[..., Any], **arguments: str) -> dict[str, str]:
    """Those arguments that this release has; the formats of outputs came later than the functions."""
    names = parameters(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
