"""Mamba layers on the CPU platform: the scan and the norm that Megatron takes from packages of CUDA kernels.

:func:`install` puts plain PyTorch in place of ``mamba_ssm``'s fused scan, of its RMS norm and of Transformer Engine's
final norm, and makes ``stack_spec``, a hybrid stack of Megatron's own modules, for
``--spec megatron_fcp.testing.cpu_mamba stack_spec``. For tests: memory grows with the square of the sequence length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["install", "local_stack_spec", "split_conv1d_scan"]


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal convolution, selective scan and gate of a Mamba-2 layer, the scan as one masked matrix product.

    Takes the arguments of ``mamba_ssm``'s ``mamba_split_conv1d_scan_combined``; the form of the scan is that of
    "structured state space duality", arXiv:2405.21060, equation 6.

    Parameters
    ----------
    zxbcdt : Tensor, shape [batch, sequence, 2 * heads * headdim + 2 * ngroups * states + heads]
    conv1d_weight : Tensor, shape [heads * headdim + 2 * ngroups * states, taps]
    conv1d_bias : Tensor, shape [heads * headdim + 2 * ngroups * states]
    dt_bias, A, D : Tensor, shape [heads]
    seq_idx : None
        Documents are not served.

    Returns
    -------
    Tensor, shape [batch, sequence, heads * headdim]
    """
    assert seq_idx is None, "documents"
    assert headdim is not None
    assert activation == "silu"
    (batch, length, _), heads, taps = zxbcdt.shape, A.numel(), conv1d_weight.shape[1]
    inner = heads * headdim
    states = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    padded = F.pad(xbc.transpose(1, 2), (taps - 1, 0))
    convolved = F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=conv1d_weight.shape[0])
    x, b, c = F.silu(convolved.transpose(1, 2)).split([inner, ngroups * states, ngroups * states], dim=-1)
    x = x.reshape(batch, length, heads, headdim)
    b, c = (t.reshape(batch, length, ngroups, states).repeat_interleave(heads // ngroups, dim=2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    passed = torch.cumsum(dt * A, dim=1)  # log of what a state has decayed by since the start
    decay = passed[:, :, None] - passed[:, None]
    visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[None, :, :, None]
    weights = torch.einsum("bthn,bshn->btsh", c, b) * decay.masked_fill(~visible, -torch.inf).exp()
    y = torch.einsum("btsh,bsh,bshp->bthp", weights, dt, x) + D[:, None] * x
    return y.reshape(batch, length, inner) * F.silu(z)


class GroupedNorm(torch.nn.Module):
    """RMS norm over groups of channels, with the constructor and checkpoint of Megatron's ``ExtendedRMSNorm``."""

    tp_group: Any = None

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(grouped, (self.group_size,), eps=self.eps).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def install() -> None:
    """Let this process build and run hybrid models; call it before the model is built."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for module, name, value in (
        (mamba_mixer, "HAVE_MAMBA_SSM", True),
        (mamba_mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan),
        (mamba_mixer, "ExtendedRMSNorm", GroupedNorm),
        (hybrid_block, "TENorm", WrappedTorchNorm),
    ):
        assert hasattr(module, name), name
        setattr(module, name, value)
    globals()["stack_spec"] = local_stack_spec()


def local_stack_spec() -> Any:
    """Mamba, attention and MLP layers of Megatron's own modules, attention named directly as in Megatron's spec."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    add: Any = get_bias_dropout_add
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=add),
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=add
            ),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=functools.partial(MLP.as_mlp_submodule, submodules=mlp),
                mlp_bda=add,
            ),
        ),
    )
    return ModuleSpec(HybridStack, submodules=layers)
