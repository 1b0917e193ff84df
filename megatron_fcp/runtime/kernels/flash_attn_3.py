"""FlashAttention 3 for Hopper: ``flash_attn_interface``, built from ``hopper/`` of the flash-attention repository.

It has no release of its own on the package index. Its Python source travels in the source archive of flash-attn
(``hopper/flash_attn_interface.py``), in two forms that are both driven here: a window as a pair and plain functions
(flash-attn 2.8.3), or two window arguments and ``torch.library`` operators (later revisions of the repository). The
argument names decide. Contract, read from that file and from ``hopper/flash_api.cpp``; not yet run on a GPU.

==================== ==================================================================================================
q, k, v              [tokens, heads, head_dim], last dimension contiguous, other strides free
LSE                  [heads, tokens] float32, natural logarithm of the scaled scores
causal               bottom-right aligned
boundaries           ``cu_seqlens``; packed rows only, so ``seqused`` stays unused
head dims            multiples of 8, q/k and v may differ; here at most 192: the deterministic backward ends below 256
GQA                  native
window, sink         ``window_size``, or ``window_size_left`` and ``_right``, -1 for none; no sink
determinism          forward always (``num_splits=1``); backward with ``deterministic=True``, which is always passed
dq, dk, dv           written into tensors given, in the dtype of q, every row of the packed ranges
other rows           none are touched
SMs                  ``sm_margin`` leaves SMs to communication
==================== ==================================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.runtime.kernels.base import Request
from megatron_fcp.runtime.kernels.packages import Package, PackagedKernel, parameters, refuse_dims, refuse_names
from megatron_fcp.runtime.kernels.varlen import Call, heads_first, unwritten

_FORWARD = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "num_splits", "sm_margin")
_BACKWARD = (*_FORWARD[:5], "softmax_lse", "dq", "dk", "dv", "deterministic", "sm_margin")


class FlashAttention3(PackagedKernel):
    """``_flash_attn_forward`` and ``_flash_attn_backward`` of ``flash_attn_interface``.

    Parameters
    ----------
    package : Package, optional
    sm_margin : int
        SMs that the kernels leave to communication.
    """

    name = "flash-attn-3"
    distribution = "flash_attn_3"
    oldest, newest = "3.0.0b1", "3.0.0"

    def __init__(self, package: Package | None = None, sm_margin: int = 0) -> None:
        super().__init__(package)
        self.sm_margin = sm_margin

    def load(self) -> Package:
        import importlib.metadata

        import flash_attn_interface as interface  # pyright: ignore[reportMissingImports]

        version = importlib.metadata.version(self.distribution)
        return Package(version, interface._flash_attn_forward, interface._flash_attn_backward)

    def refuse_shape(self, request: Request, capability: tuple[int, int]) -> str | None:
        if capability != (9, 0):
            return f"needs compute capability 9.0, not {capability[0]}.{capability[1]}"
        return refuse_dims(request, 192)

    def refuse_package(self, package: Package) -> str | None:
        return refuse_names(package, _FORWARD, _BACKWARD)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = {"q": q, "k": k, "v": v, **self._common(call, scale), "num_splits": 1}
        out, lse, *_ = _call(self.package.forward, arguments, call)
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
        arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        arguments |= {"softmax_lse": heads_first(lse), "deterministic": True}
        _call(self.package.backward, arguments | self._common(call, scale), call)
        return dq, dk, dv

    def _common(self, call: Call, scale: float) -> dict[str, Any]:
        return {**call.lengths, "softmax_scale": scale, "sm_margin": self.sm_margin}


def _call(function: Callable[..., Any], arguments: dict[str, Any], call: Call) -> Any:
    """Call in the words of the installed revision; what it requires and we do not use is None."""
    names = parameters(function).parameters
    arguments = arguments | {"causal" if "causal" in names else "is_causal": call.causal}
    if "window_size" in names:
        arguments["window_size"] = call.window_size
    else:
        arguments["window_size_left"], arguments["window_size_right"] = call.window_size
    unused = {n: None for n, p in names.items() if p.default is inspect.Parameter.empty and n not in arguments}
    return function(**arguments, **unused)
