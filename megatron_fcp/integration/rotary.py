"""Rotary embeddings by the position of each token held, not by the rank that holds it.

Megatron's rotary modules derive positions from the context-parallel rank, which is right only for its own sharding of
whole samples. ``GPTModel`` and MLA ask the module for a length and call it with that length right after, so the length
carries the positions of the batch: nothing is kept in the module, where another batch could find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.integration import session
from megatron_fcp.integration.packed import layout_of


class PositionedLength(int):
    """A rotary length, together with the positions of the tokens that the embedding is for.

    Attributes
    ----------
    positions : Tensor, int64, of the shape that broadcasts against queries without heads and channels
    """

    positions: torch.Tensor

    @staticmethod
    def of(length: int, positions: torch.Tensor) -> PositionedLength:
        """``length`` with ``positions``."""
        self = PositionedLength(length)
        self.positions = positions
        return self


def wrap_get_rotary_seq_len(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the length of a batch that FCP lays out carries its positions."""

    def get_rotary_seq_len(
        self: Any,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        *,
        inference_params: Any = None,
    ) -> int:
        run = session.current()
        if run is None or (packed_seq_params is None and not run.settings.resident):
            return original(
                self,
                inference_context,
                transformer,
                transformer_input,
                transformer_config,
                packed_seq_params,
                inference_params=inference_params,
            )
        hidden = transformer_input  # as Megatron does: later pipeline stages find theirs in the block
        if transformer is not None and transformer.input_tensor is not None:
            hidden = transformer.input_tensor
        sequence, batch = hidden.shape[:2]
        if transformer_config.sequence_parallel:
            sequence *= transformer_config.tensor_model_parallel_size
        layout = layout_of(packed_seq_params, sequence * batch, batch, self.cp_group.rank())
        positions = layout.positions_on(hidden.device)
        # MLA (which passes no transformer) drops a batch dimension of 1 when a batch is packed.
        squeezed = transformer is None and packed_seq_params is not None and batch == 1
        length = max(run.settings.seq_length, int(layout.positions.max(initial=0)) + 1)
        return PositionedLength.of(length, positions.view(sequence) if squeezed else positions.view(sequence, batch))

    return get_rotary_seq_len


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the embedding of a positioned length has one frequency per token.

    Returns ``[sequence, batch, 1, channels]`` (``[tokens, 1, channels]`` for squeezed MLA batches), which Megatron's
    unfused RoPE broadcasts over the heads. YaRN modules return their concentration factor as well.
    """

    def forward(self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        if not isinstance(max_seq_len, PositionedLength):
            return original(self, max_seq_len, offset, packed_seq, cp_group)
        table = _table(self, int(max_seq_len), offset)
        table, *factors = table if isinstance(table, tuple) else (table,)
        positions = max_seq_len.positions
        chosen = table.view(table.shape[0], -1).index_select(0, positions.reshape(-1))
        embedding = chosen.view(*positions.shape, 1, -1)
        return (embedding, *factors) if factors else embedding

    # Megatron keeps embeddings by length and clears them when it builds a YaRN module.
    forward.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    return forward


def _table(module: Any, length: int, offset: int) -> Any:
    """The module's embedding of positions ``0 .. length - 1``, kept until another length is asked for."""
    kept = module.__dict__.get("_fcp_table")
    if kept is None or kept[0] != (length, offset):
        kept = module.__dict__["_fcp_table"] = ((length, offset), module.get_emb(length, offset))
    return kept[1]
