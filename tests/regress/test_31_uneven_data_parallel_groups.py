"""Data-parallel ranks with unequal work hang: one group has another micro-batch, or other rounds, to go.

Megatron fixes one number of micro-batches for all data-parallel ranks (``num_microbatches_calculator.py``), so only
the work inside a micro-batch can differ: here one group has one long document where the other has many short ones, and
their plans differ in rounds. https://github.com/volcengine/verl/issues/6176, https://github.com/THUDM/slime/issues/1860
"""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron

DOCUMENTS = {"dataloader_inter_document_masking": True, "eod_mask_loss": True}


def one_long_or_many_short() -> None:
    """Runs in the ranks: every other sample is one document; the others are documents of 4 tokens."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def __getitem__(self: Any, idx: int) -> Any:
        sample = dict(original(self, idx))
        size = sample["tokens"].numel()
        step = size if int(idx) % 2 else 4
        offsets = torch.full((size + 1,), size, dtype=torch.int32)
        offsets[: size // step + 1] = torch.arange(0, size + 1, step, dtype=torch.int32)
        sample["cu_seqlens"], sample["max_seqlen"] = offsets, torch.tensor(step, dtype=torch.int32)
        sample["position_ids"] = torch.arange(size) % step
        sample["loss_mask"] = torch.ones(size)
        return sample

    GPTDataset.__getitem__ = __getitem__


def watch_steps() -> None:
    """Runs in the ranks: notes the data-parallel rank and the steps (calls and rounds) of every plan's forward pass."""
    one_long_or_many_short()
    from megatron.core import parallel_state

    from megatron_fcp.integration.layouts import LayoutCache
    from megatron_fcp.testing.loop_rank import note

    steps: list[tuple[int, int]] = []
    note("steps", steps)
    original = LayoutCache.get

    def get(self: Any, *args: Any) -> Any:
        layout = original(self, *args)
        steps.append((parallel_state.get_data_parallel_rank(), len(layout.rank_plan.forward)))
        return layout

    LayoutCache.get = get  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_with_other_rounds(runs: Runs, layout: str) -> None:
    one, several = (f"test_31_uneven_data_parallel_groups:{name}" for name in ("one_long_or_many_short", "watch_steps"))
    result = runs(4, **fcp(layout), **DOCUMENTS, before=(several,))
    reference = runs(context_parallel_backend="fcp", **DOCUMENTS, before=(one,))
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
    by_group: list[set[int]] = [set(), set()]
    for rank in result.ranks:
        for data_rank, count in rank.notes["steps"]:
            by_group[data_rank].add(count)
    assert by_group[0] != by_group[1]
