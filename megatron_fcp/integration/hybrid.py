"""Hybrid models: their specs name attention modules directly, so the stack swaps them when it is built.

Mamba layers bring their own context parallelism (``megatron/core/ssm/mamba_context_parallel.py``): they exchange
sequence for heads and undo Megatron's zig-zag order. That order is the reshuffle layout's outside attention, so nothing
of theirs changes there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron_fcp.integration import session


def wrap_stack_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the attention layers of a hybrid stack get FCP's core attention during a run that asks for it."""

    def __init__(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, submodules if session.current() is None else with_fcp(submodules), *args, **kwargs)

    return __init__


def with_fcp(submodules: Any) -> Any:
    """A copy of a stack's submodules with FCP's attention in place of Megatron's."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_fcp.integration.core_attention import FcpCoreAttention

    submodules = copy.deepcopy(submodules)
    for name in ("attention_layer", "mla_layer"):
        layer = getattr(submodules, name, None)
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        own = getattr(attention, "submodules", None)
        if own is not None and getattr(own, "core_attention", None) in (TEDotProductAttention, DotProductAttention):
            own.core_attention = FcpCoreAttention
    return submodules
