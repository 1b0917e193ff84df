"""Which kernels there are and which one serves a model."""

from __future__ import annotations

import torch

from megatron_fcp.runtime.kernels.base import Kernel, Request
from megatron_fcp.runtime.kernels.flash_attn_2 import FlashAttention2
from megatron_fcp.runtime.kernels.flash_attn_3 import FlashAttention3
from megatron_fcp.runtime.kernels.flash_attn_4 import FlashAttention4
from megatron_fcp.runtime.kernels.reference import Reference
from megatron_fcp.runtime.kernels.torch_cpu_flash import TorchCpuFlash
from megatron_fcp.runtime.kernels.torch_cuda_flash import TorchCudaFlash
from megatron_fcp.runtime.kernels.transformer_engine import TransformerEngine

# In order of preference. Adapters of optional packages import them when they are asked for the first time. On GPUs the
# order follows published speeds, nothing measured here.
KERNELS: tuple[Kernel, ...] = (
    TransformerEngine(),
    FlashAttention3(),
    FlashAttention4(),
    FlashAttention2(),
    TorchCudaFlash(),
    TorchCpuFlash(),
    TransformerEngine(deterministic=False),
    Reference(),
    Reference(precise=True),
)

# Kernels that "auto" passes over, and why.
BY_NAME_ONLY: dict[str, str] = {
    "transformer-engine-fast": "its backward gives other bits in every run; ask for it by name",
    "reference": "slow; ask for it by name",
    "reference-fp64": "slow; ask for it by name",
}


def select_kernel(
    name: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_v: int,
    num_heads: int,
    num_kv_heads: int,
    window: bool = False,
) -> tuple[Kernel, str]:
    """Choose a kernel before training starts.

    Parameters
    ----------
    name : str
        A kernel's name, or "auto" for the first in order of preference that can do the job.
    device : torch.device or str
    dtype : torch.dtype
        Of q, k and v.
    head_dim_qk, head_dim_v, num_heads, num_kv_heads : int
        Of one rank, that is after tensor parallelism.
    window : bool
        Whether queries may see only so many keys before them.

    Returns
    -------
    (kernel, reason) : (Kernel, str)
        The reason says why it was chosen, and why not those preferred to it.

    Raises
    ------
    ValueError
        If the name is unknown, the heads do not fit, or no kernel can do it; lists each kernel with its reason.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} attention heads on a rank cannot share {num_kv_heads} KV heads; the number of KV heads "
            "(--num-query-groups divided by the tensor-parallel size) must divide the number of heads"
        )
    names = [kernel.name for kernel in KERNELS]
    if name not in ("auto", *names):
        raise ValueError(f"--fcp-kernel {name!r} is unknown; choose one of auto, {', '.join(names)}")
    request = Request(torch.device(device), dtype, head_dim_qk, head_dim_v, num_heads, num_kv_heads, window)
    verdicts = {kernel.name: kernel.refusal(request) for kernel in KERNELS}
    table = "; ".join(f"{n}: {reason or BY_NAME_ONLY.get(n, 'can do it')}" for n, reason in verdicts.items())
    wanted = (
        f"{dtype} on {request.device.type}, head dims {head_dim_qk}/{head_dim_v}, {num_heads} heads, {num_kv_heads} KV"
        + (", a window" if window else "")
    )
    if name == "auto":
        chosen = next((k for k in KERNELS if verdicts[k.name] is None and k.name not in BY_NAME_ONLY), None)
        if chosen is None:
            raise ValueError(f"no fast attention kernel can do {wanted}: {table}")
        before = [f"{n}: {verdicts[n]}" for n in names[: names.index(chosen.name)]]
        return chosen, f"{chosen.name} serves {wanted}" + (f"; not {'; '.join(before)}" if before else "")
    if verdicts[name] is not None:
        raise ValueError(f"--fcp-kernel {name} cannot do {wanted}: {table}")
    return KERNELS[names.index(name)], f"{name} was asked for and serves {wanted}"


def capability_table(request: Request) -> dict[str, str]:
    """Verdict of every kernel on a request: "yes", or why not."""
    return {kernel.name: kernel.refusal(request) or "yes" for kernel in KERNELS}
