"""A user's layer spec that names an attention module of its own, as ``--spec foreign_spec layer`` asks for it."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention


class ForeignAttention(DotProductAttention):
    """Attention to the tokens of its own rank, whatever the rank holds."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return query.flatten(2)


layer = get_gpt_layer_local_spec(normalization="RMSNorm")
layer.submodules.self_attention.submodules.core_attention = ForeignAttention
