"""Megatron's shardings as index arrays, against their definitions."""

import numpy as np
import pytest

from megatron_fcp.plan.sharding import batched, contiguous, zigzag, zigzag_per_document

pytestmark = pytest.mark.plan


def lists(layout: tuple[np.ndarray, ...]) -> list[list[int]]:
    return [index.tolist() for index in layout]


def test_zigzag_of_a_stream() -> None:
    assert lists(zigzag(8, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert lists(zigzag(5, 1)) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_zigzag_is_megatrons_view_and_index_select(cp_size: int) -> None:
    """``get_batch_on_this_cp_rank`` views the sequence as 2 cp chunks and selects two of them."""
    length = 2 * cp_size * 3
    chunks = np.arange(length).reshape(2 * cp_size, 3)
    for rank, index in enumerate(zigzag(length, cp_size)):
        assert index.tolist() == chunks[[rank, 2 * cp_size - rank - 1]].reshape(-1).tolist()


def test_zigzag_per_document_is_not_that_of_the_stream() -> None:
    assert lists(zigzag_per_document([0, 4, 4, 12], 2)) == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert lists(zigzag_per_document([0, 3, 5], 1)) == [[0, 1, 2, 3, 4]]
    assert lists(zigzag_per_document([0], 2)) == [[], []]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_every_token_is_held_once(cp_size: int) -> None:
    for layout in (
        zigzag(12, cp_size),
        contiguous(12, cp_size),
        zigzag_per_document([0, 12, 12, 24], cp_size),
        batched(zigzag(12, cp_size), 3, "sb"),
        batched(zigzag(12, cp_size), 3, "bs"),
    ):
        total = sum(index.size for index in layout)
        assert sorted(np.concatenate(layout).tolist()) == list(range(total))
        assert len({index.size for index in layout}) == 1


def test_a_batch_is_flattened_as_the_tensor_is() -> None:
    """Outside attention Megatron's tensors are [s, b, h]; two sequences of 8 tokens lie one after the other."""
    stream = np.arange(16).reshape(2, 8)  # [b, s]
    for rank, index in enumerate(zigzag(8, 2)):
        local = stream[:, index]  # [b, s_local]
        assert batched(zigzag(8, 2), 2, "bs")[rank].tolist() == local.reshape(-1).tolist()
        assert batched(zigzag(8, 2), 2, "sb")[rank].tolist() == local.T.reshape(-1).tolist()


def test_lengths_that_cannot_be_cut_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match="document 0 holds 10 tokens, which cannot be cut into 4 equal pieces; pad it to 12 or shorten it to 8",
    ):
        zigzag(10, 2)
    with pytest.raises(
        ValueError, match="document 1 holds 3 tokens, which cannot be cut into 4 equal pieces; pad it to 4"
    ):
        zigzag_per_document([0, 4, 7], 2)
    with pytest.raises(ValueError, match="the stream holds 7 tokens"):
        contiguous(7, 2)
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0 and never fall"):
        zigzag_per_document([0, 8, 4], 2)
