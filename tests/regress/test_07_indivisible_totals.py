"""Totals that the ranks do not divide: refused with the nearest sizes that work, or padded without a trace.

https://github.com/jzhang38/EasyContext/issues/47, https://github.com/jzhang38/EasyContext/issues/10 (the forward pass
hangs), https://github.com/feifeibear/long-context-attention/issues/154 (8423 tokens)
"""

from __future__ import annotations

import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.integration.layouts import Boundaries, Layout
from megatron_fcp.integration.settings import Settings
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.sharding import contiguous, zigzag, zigzag_per_document
from megatron_fcp.testing.attention_check import Model, check_in_threads

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize(("cp_size", "below", "above"), [(8, 8416, 8432), (4, 8416, 8424), (3, 8418, 8424)])
def test_megatrons_sharding_names_the_nearest_lengths(cp_size: int, below: int, above: int) -> None:
    for cut in (zigzag, lambda n, cp: zigzag_per_document([0, 2 * cp, 2 * cp + n], cp)):
        with pytest.raises(ValueError, match=rf"8423 tokens.*pad it to {above} or shorten it to {below}$"):
            cut(8423, cp_size)


def test_pieces_of_a_stream_name_the_nearest_lengths() -> None:
    with pytest.raises(ValueError, match=r"7 tokens.*2 equal pieces; pad it to 8 or shorten it to 6$"):
        contiguous(7, 2)


@pytest.mark.parametrize("layout", ["reshuffle", "resident"])
@pytest.mark.parametrize(("seq_length", "cp_size", "below", "above"), [(8423, 8, 8416, 8432), (7, 2, 4, 8)])
def test_a_batch_names_the_nearest_sequence_lengths(
    seq_length: int, cp_size: int, below: int, above: int, layout: str
) -> None:
    settings = Settings(FcpConfig(layout=layout), cp_size, seq_length, "packed", "sequence", True)  # type: ignore[arg-type]
    boundaries = Boundaries.of_packed(torch.tensor([0, 3, seq_length]), seq_length)
    with pytest.raises(ValueError, match=rf"--seq-length {seq_length}.*--seq-length {below} or {above}$"):
        Layout(boundaries, settings, 0)


def test_blocks_name_the_nearest_sizes() -> None:
    with pytest.raises(ValueError, match=r"--fcp-block-size 24 .* 64 tokens per rank.* 16 and 32$"):
        FcpConfig(block_size=24).resolve_block_size(64)


def test_a_stream_without_room_says_how_much_is_missing() -> None:
    with pytest.raises(ValueError, match=r"document 0 holds 8423 tokens .* only 8416; raise "):
        make_plan([8423], cp_size=8, tokens_per_rank=1052)


@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_documents_of_any_total_need_no_padding_of_their_own(cp_size: int) -> None:
    lengths = [8, 4, 23, 1]  # 36 tokens, and one more below
    for total in (lengths, [*lengths, 1]):
        plan = make_plan(total, cp_size=cp_size, tokens_per_rank=24, config=FcpConfig(block_size=8))
        assert plan.table.real_tokens == sum(total)
        check_in_threads(plan, Model())
