"""Multi-token prediction rolls labels across documents, or to the neighbour rank of another sharding.

https://github.com/NVIDIA/Megatron-LM/issues/4495, https://github.com/NVIDIA/Megatron-LM/issues/6205,
https://github.com/NVIDIA/Megatron-LM/issues/7498
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.integration.batch import take_tokens
from megatron_fcp.integration.layouts import Boundaries, Layout
from megatron_fcp.integration.mtp import Successors
from megatron_fcp.integration.settings import Settings
from megatron_fcp.runtime import Communicator
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.runtime

SEQ_LENGTH = 48
# Offsets of a stream of one or two samples: None for whole samples.
STREAMS: dict[str, tuple[int, list[int] | None]] = {
    "whole samples": (2, None),
    "one document": (1, [0, 48]),
    "documents of one token": (1, [0, 1, 2, 3, 20, 21, 47, 48]),
    "only documents of one token": (1, list(range(49))),
    "empty documents and two samples": (2, [0, 7, 7, 30, 48, 61, 61, 96, 96]),
    "padding behind the last document": (1, [0, 16, 17, 40]),
    "documents cut by document": (2, [0, 24, 24, 48, 96]),  # as --sft pads them: 2 * cp_size divides every length
}


def rolled_by_document(values: np.ndarray, offsets: list[int], depth: int) -> np.ndarray:
    """The value ``depth`` places on in the same document, else 0."""
    out = np.zeros_like(values)
    for start, end in itertools.pairwise(offsets):
        out[start : max(end - depth, start)] = values[start + depth : end]
    return out


def roll_and_dispatch(comm: Communicator, case: dict[str, Any]) -> list[tuple[bool, bool]]:
    """On every rank, for depths 1, 2 and 3: whether roll(dispatch(x)) == dispatch(roll(x)), of labels and of a mask."""
    samples, offsets = case["samples"], case["offsets"]
    settings = Settings(
        FcpConfig(block_size=4, layout=case["layout"]), comm.size, SEQ_LENGTH, "packed", case["sharding"], True
    )
    size = samples * SEQ_LENGTH
    if offsets is None:
        boundaries = Boundaries.of_samples(samples, SEQ_LENGTH)
        offsets = [int(offset) for offset in boundaries.offsets]
    else:
        boundaries = Boundaries.of_packed(torch.tensor(offsets), SEQ_LENGTH)
    layout = Layout(boundaries, settings, comm.rank)
    labels = np.arange(1, size + 1)
    mask = np.where(labels % 5, 1.0, 0.0).astype(np.float32)

    def dispatch(values: np.ndarray) -> torch.Tensor:
        stream = torch.from_numpy(values).view(samples, SEQ_LENGTH)
        return take_tokens({"labels": stream}, layout, SEQ_LENGTH)["labels"]

    successors = Successors(layout, torch.distributed.group.WORLD, torch.device("cpu"))
    found = []
    here, valid = dispatch(labels), dispatch(mask)
    for depth in (1, 2, 3):
        here, valid = successors.roll(here), successors.roll(valid)
        found.append(
            (
                torch.equal(here, dispatch(rolled_by_document(labels, offsets, depth))),
                torch.equal(valid, dispatch(rolled_by_document(mask, offsets, depth))),
            )
        )
    return found


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
@pytest.mark.parametrize("stream", STREAMS)
def test_roll_and_dispatch_commute(gloo: GlooPool, stream: str, layout: str, cp_size: int) -> None:
    samples, offsets = STREAMS[stream]
    sharding = "document" if stream == "documents cut by document" else "sequence"
    case = {"samples": samples, "offsets": offsets, "layout": layout, "sharding": sharding}
    for found in gloo.run(cp_size, roll_and_dispatch, case):
        assert found == [(True, True)] * 3


def rolled_by_megatron(offsets: list[int]) -> list[list[int]]:
    """Runs in a rank: Megatron's own roll of a packed stream at context-parallel size 1, depths 1 to 3."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    documents = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    stream, found = torch.arange(1, offsets[-1] + 1)[None], []
    for _ in range(3):
        stream, _ = roll_tensor(stream, packed_seq_params=documents)
        found.append(stream[0].tolist())
    return found


@pytest.mark.megatron
def test_reference_is_megatrons_roll_on_one_rank(training_loop: TrainingLoop) -> None:
    offsets = [0, 1, 2, 3, 20, 21, 47, 48]
    found = training_loop.call("test_10_rolls_across_documents:rolled_by_megatron", offsets)
    for depth, values in enumerate(found, start=1):
        np.testing.assert_array_equal(values, rolled_by_document(np.arange(1, 49), offsets, depth))
