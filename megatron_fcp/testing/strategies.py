"""Hypothesis strategies for packed streams; small examples first, so that failures shrink to a stream one can draw."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

from hypothesis import strategies as st

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.testing.streams import Case, edge_lengths, edge_windows


@st.composite
def cases(draw: st.DrawFn, *, max_cp_size: int = 8, max_blocks_per_rank: int = 4) -> Case:
    """A stream of documents of lengths around block edges, with one giant among them or not, and how to plan it."""
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    cp_size = draw(st.integers(1, max_cp_size))
    tokens_per_rank = block_size * draw(st.integers(1, max_blocks_per_rank))
    num_tokens = cp_size * tokens_per_rank
    lengths = draw(st.lists(st.sampled_from(edge_lengths(block_size)) | st.integers(0, num_tokens), max_size=24))
    fitting = [length for length, total in zip(lengths, accumulate(lengths)) if total <= num_tokens]
    starts = draw(st.none() | _starts(fitting, num_tokens))
    mask: Mask = draw(st.sampled_from(["causal", "full"]))
    config = FcpConfig(
        block_size=block_size,
        mask=mask,
        blocks_per_message=draw(st.sampled_from([16, 1, 2])),
        rounds_per_stage=draw(st.none() | st.integers(1, 4)),
        ranks_per_node=draw(st.sampled_from([1, 2, 3, 8])),
    )
    return Case(tuple(fitting), starts, cp_size, tokens_per_rank, config)


@st.composite
def windowed_cases(draw: st.DrawFn, *, max_cp_size: int = 8, max_blocks_per_rank: int = 4) -> Case:
    """A stream of :func:`cases` for causal layers with a window, alone or beside others that see whole documents."""
    case = draw(cases(max_cp_size=max_cp_size, max_blocks_per_rank=max_blocks_per_rank))
    block_size = case.config.block_size
    assert block_size is not None
    edges = edge_windows(block_size, max(case.lengths, default=0))
    window = draw(st.sampled_from(edges) | st.integers(0, case.cp_size * case.tokens_per_rank))
    config = dataclasses.replace(case.config, mask="causal")
    return dataclasses.replace(case, config=config, window=window, layers=draw(st.sampled_from(["alike", "mixed"])))


@st.composite
def _starts(draw: st.DrawFn, lengths: list[int], num_tokens: int) -> tuple[int, ...]:
    room = num_tokens - sum(lengths)
    gaps = sorted(draw(st.lists(st.integers(0, room), min_size=len(lengths), max_size=len(lengths))))
    return tuple(gap + total - length for gap, total, length in zip(gaps, accumulate(lengths), lengths))
