"""Zigzag of the whole stream taken for zigzag per document: tokens, positions and attention disagree.

https://github.com/NVIDIA/Megatron-LM/issues/5191
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.integration.batch import take_tokens
from megatron_fcp.integration.layouts import Boundaries, Layout
from megatron_fcp.integration.settings import Settings
from megatron_fcp.plan.sharding import zigzag, zigzag_per_document
from megatron_fcp.runtime import fcp_attention, reshuffle
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.attention_check import NAMES, TOLERANCE, Model, random_inputs, right_answer
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

OFFSETS, SEQ_LENGTH = [0, 8, 24, 24, 40, 48], 48  # every document can be cut at cp 4
PLACES = torch.cat([torch.arange(n) for n in torch.tensor(OFFSETS).diff()])
MODEL = Model()


def layouts(cp_size: int, **changes: Any) -> list[Layout]:
    """Every rank's layout."""
    options = {"layout": "reshuffle", "sharding": "document", **changes}
    config = FcpConfig(block_size=4, layout=options["layout"])
    settings = Settings(config, cp_size, SEQ_LENGTH, "packed", options["sharding"], True)
    boundaries = Boundaries.of_packed(torch.tensor(OFFSETS), SEQ_LENGTH)
    return [Layout(boundaries, settings, rank) for rank in range(cp_size)]


CASES = [{"sharding": "document"}, {"sharding": "sequence"}, {"layout": "resident"}]


def test_the_two_cuts_are_told_apart() -> None:
    whole, apart = zigzag(24, 2), zigzag_per_document([0, 8, 24], 2)
    assert whole[0].tolist() == [*range(6), *range(18, 24)]
    assert apart[0].tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    for sharding, cut in (("sequence", zigzag(SEQ_LENGTH, 4)), ("document", zigzag_per_document(OFFSETS, 4))):
        for layout, index in zip(layouts(4, sharding=sharding), cut):
            np.testing.assert_array_equal(layout.index, index)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_one_index_feeds_batch_and_positions(cp_size: int, case: dict[str, Any]) -> None:
    ranks = layouts(cp_size, **case)
    stream = torch.arange(SEQ_LENGTH)[None]
    held = [take_tokens({"tokens": stream, "position_ids": PLACES[None]}, layout, SEQ_LENGTH) for layout in ranks]
    tokens = [batch["tokens"].t().reshape(-1) for batch in held]
    assert torch.equal(torch.cat(tokens).sort().values, stream[0])
    for layout, token, batch in zip(ranks, tokens, held):
        np.testing.assert_array_equal(layout.index, token)
        np.testing.assert_array_equal(layout.positions, PLACES[token])
        np.testing.assert_array_equal(layout.positions, batch["position_ids"].t().reshape(-1))


def attend(comm: Transport, layout: Layout, x: Any) -> list[torch.Tensor]:
    """One rank's tokens, numbered and attended to by its layout: as Megatron's layers use it."""
    device = torch.device("cpu")
    index, plan = layout.index_on(device), layout.compiled(device)
    leaves = [t[index].requires_grad_() for t in (x.q, x.k, x.v)]
    inside = torch.from_numpy(layout.rank_plan.local_token_global_indices.copy())
    qkv, group = leaves, comm if comm.size > 1 else None
    resident = torch.equal(index, inside)
    if not resident:
        numbered, *qkv = reshuffle((index, *leaves), layout.route(device), group)
        assert torch.equal(numbered, inside)  # arange goes there ...
        (back,) = reshuffle((numbered,), layout.route(device).reverse(), group)
        assert torch.equal(back, index)  # ... and comes back
    out = fcp_attention(*qkv, plan=plan, comm=group, kernel=MODEL.select())
    if not resident:
        (out,) = reshuffle((out,), layout.route(device).reverse(), group)
    out.backward(x.dout[index])
    return [index, out.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_same_index_feeds_attention(cp_size: int, case: dict[str, Any]) -> None:
    ranks = layouts(cp_size, **case)
    plan = ranks[0].plan
    x = random_inputs(plan, MODEL, 1)
    want = right_answer(plan, MODEL, x)
    for index, *got in run_ranks(cp_size, lambda comm: attend(comm, ranks[comm.rank], x)):
        for name, value, right in zip(NAMES, got, want.tensors()):
            assert (value - right[index]).abs().max() < TOLERANCE, name
