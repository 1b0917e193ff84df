"""Megatron's own context parallelism on the CPU platform, with an attention module in place of Transformer Engine's.

Megatron's ``--transformer-impl local`` runs everything at context-parallel size 2 but its attention module, which
says that only Transformer Engine's supports it. :func:`install` supplies that one module: it gathers queries, keys and
values from the group (``all_gather`` is one of the exchanges Transformer Engine offers), undoes Megatron's zig-zag
order and runs Megatron's own ``DotProductAttention`` on whole samples. Sharding, rotary positions, loss, optimizer and
checkpoints are those of ``--context-parallel-backend native``. For tests: nothing about it is fast.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

__all__ = ["install"]


def install() -> None:
    """Name the attention in the specs of ``--transformer-impl local``; call it before the model is built."""
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_fcp.plan.sharding import zigzag

    base: Any = DotProductAttention

    class GatheredAttention(base):
        """Attention of whole samples, computed by every rank of the group; each keeps its own rows."""

        def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, pg_collection=pg_collection, **kwargs)
            self.cp_group = pg_collection.cp

        def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            order = np.concatenate(zigzag(query.shape[0] * self.cp_group.size(), self.cp_group.size()))
            back = torch.from_numpy(np.argsort(order))
            whole = (gather_from_sequence_parallel_region(t, group=self.cp_group)[back] for t in (query, key, value))
            out = super().forward(*whole, None, **kwargs)
            return out[torch.from_numpy(order)].chunk(self.cp_group.size())[self.cp_group.rank()]

    original = LocalSpecProvider.core_attention

    def core_attention(self: Any) -> type:
        kind = original(self)
        return GatheredAttention if kind is DotProductAttention else kind

    LocalSpecProvider.core_attention = core_attention
