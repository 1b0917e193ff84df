"""FCP as Megatron's core attention: the module that a layer spec names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_fcp.integration import session
from megatron_fcp.integration.packed import layout_of
from megatron_fcp.integration.windows import layer_window
from megatron_fcp.runtime import fcp_attention, reshuffled_attention, select_kernel

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
HOW_TO_BUILD = (
    "build layers from Megatron's spec functions (without --spec, or with a spec that asks the backend's "
    "core_attention())"
)
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class FcpCoreAttention(MegatronModule):
    """Attention over the context-parallel group, by the plan of each batch.

    Takes the constructor arguments and the call of megatron-core 0.19's core attentions. Where ``softmax_type`` is
    "learnable" it holds ``softmax_offset``, one logit per head of this tensor-parallel rank, under the name and with
    the sharding of Megatron's and Transformer Engine's core attentions, so that checkpoints carry over. Nothing else
    belongs in a checkpoint.

    Parameters
    ----------
    config : TransformerConfig
        ``window_size``, ``window_attn_skip_freq`` and ``softmax_type`` mean what they mean to Megatron's own.
    layer_number : int
        Counted from 1.
    attn_mask_type : AttnMaskType
        Causal, with or without padding.
    attention_type : str
        "self".
    attention_dropout : float, optional
        0, or None for the configuration's.
    softmax_scale : float, optional
        Default: one over the square root of the channels of a key head.
    k_channels, v_channels : int, optional
        Channels per head, where they differ from ``config.kv_channels`` (MLA).
    num_splits, cp_comm_type : optional
        Ignored: they concern Megatron's own kernels and the exchange of its own context parallelism.
    pg_collection : ProcessGroupCollection, optional
        Its ``cp`` and ``tp`` are the context- and the tensor-parallel group.

    Raises
    ------
    ValueError
        For what FCP's attention cannot do; names the setting and the way out.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_layer(config, attn_mask_type, attention_type, dropout)
        run = session.required()
        given = getattr(pg_collection, "cp", None)
        self.cp_group = session.cp_group() if given is None else given
        run.communicator(self.cp_group)  # made here, where all ranks of the group build the same layers
        self.head_dim_qk = k_channels or config.kv_channels
        self.head_dim_v = v_channels or config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(self.head_dim_qk)
        self.window = layer_window(config, layer_number)
        self.tp_group = getattr(pg_collection, "tp", None) or session.tp_group()
        self._make_sink(config)
        self._kernel: Any = None
        run.attention_layers += 1

    def _make_sink(self, config: Any) -> None:
        """``softmax_offset``: None, zeros that are no state, or a parameter; drawn as Megatron's local one draws it."""
        self.softmax_offset: torch.Tensor | None
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        heads = config.num_attention_heads // self.tp_group.size()
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads, **options)
            return
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, **options))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """The learnable sink, cut over tensor-parallel ranks; nothing where there is none."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """Attend.

        Parameters
        ----------
        query : Tensor, shape [sequence, batch, num_heads, head_dim_qk] or [tokens, num_heads, head_dim_qk]
            Of this tensor-parallel rank's heads and this context-parallel rank's tokens.
        key, value : Tensor
            The same with ``num_kv_heads`` and their own channels.
        attention_mask, num_splits : optional
            Ignored: the plan's documents are the mask.
        attn_mask_type, attention_bias : optional
            Causal, with or without padding; and no bias.
        packed_seq_params : PackedSeqParams, optional
            Carries the layout of a batch with document boundaries.

        Returns
        -------
        Tensor, shape [sequence, batch, num_heads * head_dim_v] (batch is 1 for three-dimensional inputs)

        Raises
        ------
        ValueError
            For a bias, another mask, or fewer queries than keys, as in inference.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by FCP's attention; use rope or learned_absolute")
        if attn_mask_type is not None and attn_mask_type not in CAUSAL:
            raise ValueError(f"attention mask {attn_mask_type} is not supported by FCP's attention; use a causal one")
        sequence, batch = (query.shape[0], 1) if query.dim() == 3 else query.shape[:2]
        if key.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"FCP's attention has no inference path: queries {tuple(query.shape)}, keys {tuple(key.shape)}; "
                "generate text with --context-parallel-backend native"
            )
        run = session.required()
        comm = run.communicator(self.cp_group)
        layout = layout_of(packed_seq_params, sequence * batch, batch, comm.rank)
        q, k, v = (t.reshape(sequence * batch, *t.shape[-2:]) for t in (query, key, value))
        kernel = self._kernel_for(q, k)
        plan = layout.compiled(q.device, self.window)
        attend = {"plan": plan, "comm": comm, "kernel": kernel, "softmax_scale": self.softmax_scale}
        attend["sink"] = self.softmax_offset
        if run.settings.resident:
            out = fcp_attention(q, k, v, **attend)
        else:
            out = reshuffled_attention(
                q, k, v, route=layout.route(q.device), max_groups=run.settings.config.head_groups, **attend
            )
        return out.reshape(sequence, batch, -1)

    def _kernel_for(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        if self._kernel is None:
            self._kernel, _ = select_kernel(
                session.required().settings.config.kernel,
                device=q.device,
                dtype=q.dtype,
                head_dim_qk=self.head_dim_qk,
                head_dim_v=self.head_dim_v,
                num_heads=q.shape[-2],
                num_kv_heads=k.shape[-2],
                window=self.window is not None,
            )
        return self._kernel


def _check_layer(config: Any, attn_mask_type: AttnMaskType, attention_type: str, dropout: float) -> None:
    """Refuse what only the model's own configuration shows; the command line was checked before."""
    for name, value, remedy in (
        ("attention_dropout", dropout, "set it to 0"),
        ("softmax_type", None if config.softmax_type in SOFTMAX_TYPES else config.softmax_type, "set it to vanilla"),
        ("fp8_dot_product_attention", config.fp8_dot_product_attention, "set it to False; pass --fp8-format alone"),
        ("fp8_multi_head_attention", config.fp8_multi_head_attention, "set it to False; pass --fp8-format alone"),
        ("attention_type", None if attention_type == "self" else attention_type, "use decoder-only models"),
        ("attn_mask_type", None if attn_mask_type in CAUSAL else attn_mask_type, "use a causal mask"),
    ):
        if value:
            raise ValueError(f"{name} {value} is not supported by FCP's attention yet; {remedy}")


def wrap_core_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the layer specs of a backend name FCP's attention during a run that asks for it."""

    def core_attention(self: Any) -> type:
        return original(self) if session.current() is None else FcpCoreAttention

    return core_attention


def wrap_attention_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: a layer whose spec names another attention module is refused, on whatever pipeline stage it is."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if session.current() is None or isinstance(self.core_attention, FcpCoreAttention):
            return
        if self.attention_type == "self" and self.attn_mask_type in CAUSAL:
            raise RuntimeError(
                f"--context-parallel-backend fcp: layer {self.layer_number} was built with "
                f"{type(self.core_attention).__name__} and not with FCP's attention; {HOW_TO_BUILD}"
            )

    return __init__
