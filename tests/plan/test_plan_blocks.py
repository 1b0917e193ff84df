"""Blocks, fragments and what of a block ever travels."""

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_fcp.plan import build_block_table
from megatron_fcp.testing.strategies import cases
from megatron_fcp.testing.streams import Case

pytestmark = pytest.mark.plan

# Blocks of 4:   | d0 d0 d0 d0 | d0 d0 d1 d1 | d2 d2 d2 d2 | d2 d2 d2 d2 | d2 -- -- -- |
LENGTHS = [6, 2, 9]


def test_fragments_cut_documents_at_block_edges() -> None:
    table = build_block_table(LENGTHS, num_tokens=20, block_size=4)
    fragments = zip(table.fragment_document, table.fragment_block, table.fragment_start, table.fragment_length)
    assert [tuple(map(int, f)) for f in fragments] == [
        (0, 0, 0, 4),
        (0, 1, 4, 2),
        (1, 1, 6, 2),
        (2, 2, 8, 4),
        (2, 3, 12, 4),
        (2, 4, 16, 1),
    ]
    assert table.fragment_ptr.tolist() == [0, 1, 3, 4, 5, 6]
    assert (table.num_tokens, table.real_tokens) == (20, 17)


def test_causal_costs_and_shared_ranges() -> None:
    table = build_block_table(LENGTHS, num_tokens=20, block_size=4)
    assert table.block_cost.tolist() == [1 + 2 + 3 + 4, (5 + 6) + (1 + 2), 1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9]
    shared = list(zip(table.shared_start.tolist(), table.shared_stop.tolist()))
    assert shared[0] == (0, 4)
    assert shared[1][0] == shared[1][1]  # both of its documents end in it
    assert shared[2:4] == [(8, 12), (12, 16)]
    assert shared[4][0] == shared[4][1]


def test_full_costs_and_shared_ranges() -> None:
    table = build_block_table(LENGTHS, num_tokens=20, block_size=4, mask="full")
    assert table.block_cost.tolist() == [4 * 6, 2 * 6 + 2 * 2, 4 * 9, 4 * 9, 9]
    shared = list(zip(table.shared_start.tolist(), table.shared_stop.tolist()))
    assert shared == [(0, 4), (4, 6), (8, 12), (12, 16), (16, 17)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_blocks_hold_each_real_token_once_and_cost_its_pairs(case: Case) -> None:
    table = case.plan().table
    document = np.full(table.num_tokens, -1)
    for d, block, start, length in zip(
        table.fragment_document, table.fragment_block, table.fragment_start, table.fragment_length
    ):
        assert length > 0
        assert block == start // table.block_size == (start + length - 1) // table.block_size
        assert (document[start : start + length] == -1).all()
        document[start : start + length] = d
    assert (document == table.token_documents()).all()

    token = np.arange(table.num_tokens)
    pairs = (document[:, None] == document[None, :]) & (document[:, None] >= 0)
    if case.config.mask == "causal":
        pairs &= token[:, None] >= token[None, :]
    per_block = pairs.sum(axis=1).reshape(-1, table.block_size).sum(axis=1)
    assert table.block_cost.tolist() == per_block.tolist()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_shared_ranges_are_just_what_other_blocks_attend_to(case: Case) -> None:
    table = case.plan().table
    size, document = table.block_size, table.token_documents()
    for block in range(table.num_blocks):
        mine = document[block * size : (block + 1) * size]
        others = (
            document[(block + 1) * size :]
            if case.config.mask == "causal"
            else np.delete(document, slice(block * size, (block + 1) * size))
        )
        wanted = np.flatnonzero((mine >= 0) & np.isin(mine, others)) + block * size
        start, stop = int(table.shared_start[block]), int(table.shared_stop[block])
        if wanted.size:
            assert (start, stop) == (wanted[0], wanted[-1] + 1)
        else:
            assert start == stop


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4, -1], r"-1 \(document 1\) is negative"),
        ([4, 2.0], r"2\.0 \(document 1\) is not an integer"),
        (["4"], r"'4' \(document 0\) is not an integer"),
        ([3, True], r"True \(document 1\) is not an integer"),
        ([None], r"None \(document 0\) is not an integer"),
        ([[1, 2]], r"\[1, 2\] \(document 0\) is not an integer"),
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        (np.array([1.5]), r"1\.5 \(document 0\) is not an integer"),
        ([1, 2**70], "past the limit"),
        (np.array([2**63], dtype=np.uint64), "past the limit"),
        ([8, 9], r"17 tokens but the stream has only 16"),
        ([2, 17], r"document 1 holds 17 tokens but the whole stream has only 16"),
        (None, "must be a list of integers, not None"),
        (5, "must be a list of integers, not 5"),
        ([2**31 - 1] * 8, "the whole stream has only 16"),
    ],
)
def test_bad_lengths_are_named(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_block_table(lengths, num_tokens=16, block_size=4)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0], "2 document lengths but 1 document starts"),
        ([0, 3], r"document 0 ends at token 4, after the start of the next document"),
        ([8, 0], "after the start of the next document"),
        ([0, 13], "17 tokens but the stream has only 16"),
        ([-2, 8], r"document start -2 \(document 0\) is negative"),
    ],
)
def test_bad_starts_are_named(starts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_block_table([4, 4], num_tokens=16, block_size=4, starts=starts)


def test_empty_documents_count_when_a_bad_start_is_named() -> None:
    with pytest.raises(ValueError, match=r"document 1 ends at token 10, after the start of the next document"):
        build_block_table([0, 10, 0, 5], num_tokens=16, block_size=4, starts=[0, 0, 3, 5])


def test_numpy_integers_of_any_width_are_lengths() -> None:
    want = build_block_table([3, 5], num_tokens=8, block_size=4)
    for lengths in (np.array([3, 5], dtype=np.int32), np.array([3, 5], dtype=np.uint64), [np.int64(3), 5]):
        assert build_block_table(lengths, num_tokens=8, block_size=4).block_cost.tolist() == want.block_cost.tolist()
