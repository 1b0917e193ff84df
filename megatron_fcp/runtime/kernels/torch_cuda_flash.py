"""PyTorch's own variable-length flash attention on CUDA: always there, nothing to install.

``torch.nn.attention.activate_flash_attention_impl("FA3" | "FA4")`` swaps the implementation behind the same operators,
so this adapter runs those too. Contract, read from the operators' schema, their fake implementations and
``torch/nn/attention/varlen.py`` of torch 2.14; not yet run on a GPU.

==================== ==================================================================================================
q, k, v              [tokens, heads, head_dim], last dimension contiguous, other strides free
LSE                  [heads, tokens] float32, natural logarithm of the scaled scores
causal               bottom-right aligned (FlashAttention 2.1 and later)
boundaries           ``cum_seq_q`` and ``cum_seq_k``, int32; packed rows only
head dims            one for q, k and v, multiple of 8, at most 256: V or Q and K get zero columns where they differ
GQA                  native
window, sink         ``window_size_left`` and ``_right``, None for none; no sink
determinism          forward always; backward while torch's deterministic mode is on, which is switched on around it
dq, dk, dv           returned, in the dtype of q, every row of the packed ranges
other rows           none are touched
==================== ==================================================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.runtime.kernels.base import Request
from megatron_fcp.runtime.kernels.packages import refuse_device, refuse_dims
from megatron_fcp.runtime.kernels.varlen import Call, VarlenKernel, heads_first


class TorchCudaFlash(VarlenKernel):
    """``aten::_flash_attention_forward`` and ``aten::_flash_attention_backward``.

    Parameters
    ----------
    forward_op, backward_op : callable, optional
        Stand in for the operators; tests use them.
    """

    name = "torch-cuda"

    def __init__(
        self, forward_op: Callable[..., Any] | None = None, backward_op: Callable[..., Any] | None = None
    ) -> None:
        self._forward = forward_op or torch.ops.aten._flash_attention_forward.default
        self._backward = backward_op or torch.ops.aten._flash_attention_backward.default

    def refusal(self, request: Request) -> str | None:
        reason = refuse_device(request)
        if reason is None:
            capability = torch.cuda.get_device_capability(request.device)
            if capability < (8, 0):
                return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
            reason = refuse_dims(request, 256)
        return reason

    def padded_dims(self, dim_qk: int, dim_v: int) -> tuple[int, int]:
        return max(dim_qk, dim_v), max(dim_qk, dim_v)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv
        out, lse, *_ = self._forward(q, k, v, *lengths, 0.0, call.causal, False, scale=scale, **_window(call))
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
        lengths = call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        tensors = dout, q, k, v, out, heads_first(lse)
        with _deterministic:
            return self._backward(*tensors, *lengths, 0.0, call.causal, *no_dropout, scale=scale, **_window(call))


def _window(call: Call) -> dict[str, int]:
    return {} if call.window is None else {"window_size_left": call.window, "window_size_right": 0}


class _Deterministic:
    """Torch's deterministic mode, without its filling of fresh memory, while any thread is inside.

    The mode belongs to the whole process: the first thread in remembers what was set, the last one out restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = False, False, False

    def __enter__(self) -> None:
        memory: Any = torch.utils.deterministic
        with self._lock:
            if self._inside == 0:
                warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
                enabled = torch.are_deterministic_algorithms_enabled()
                self._before = enabled, warn_only, memory.fill_uninitialized_memory
                torch.use_deterministic_algorithms(True)
                memory.fill_uninitialized_memory = False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        memory: Any = torch.utils.deterministic
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                enabled, warn_only, fill = self._before
                torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
                memory.fill_uninitialized_memory = fill


_deterministic = _Deterministic()
