"""Multi-token prediction on documents: no rank and no layout predicts across a boundary."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingResult, compare

pytestmark = pytest.mark.megatron

ONE, TWO = {"mtp_num_layers": 1}, {"mtp_num_layers": 2}


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


def test_boundaries_matter(runs: Runs) -> None:
    """Megatron by itself, on one rank, lets the extra loss see the next document where tokens mark the boundaries."""
    across = compare(runs(model=ONE, **EOD), runs(model=ONE, context_parallel_backend="fcp", **INDEX))
    assert across.gradient > 1e-3


@pytest.mark.feature("Loss: multi-token prediction, documents")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", [EOD, INDEX], ids=["tokens", "index"])
def test_documents_equal_one_rank(runs: Runs, data: dict[str, Any], layout: str) -> None:
    assert_equal(runs(2, ONE, **fcp(layout), **data), runs(model=ONE, context_parallel_backend="fcp", **INDEX))


@pytest.mark.feature("Loss: multi-token prediction, documents, depth 2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, {"micro_batch_size": 2}),
        pytest.param(4, {"pipeline_model_parallel_size": 2}, marks=pytest.mark.nightly(seconds=25)),
        pytest.param(4, {"cp_size": 4}, marks=pytest.mark.nightly(seconds=19)),
        pytest.param(4, SPLIT_TENSORS, marks=pytest.mark.nightly(seconds=17)),
    ],
    ids=["micro-batch 2", "pp 2", "cp 4", "tp 2 + sp"],
)
def test_depth_2(runs: Runs, world_size: int, flags: dict[str, Any], layout: str) -> None:
    batches = {name: value for name, value in flags.items() if name == "micro_batch_size"}
    reference = runs(model=TWO, context_parallel_backend="fcp", **INDEX, **batches)
    assert_equal(runs(world_size, TWO, **fcp(layout, **flags), **INDEX), reference)


def test_one_rank_stops_at_end_of_document_tokens_as_well(runs: Runs) -> None:
    one = {"context_parallel_backend": "fcp"}
    assert_equal(runs(model=ONE, **one, **EOD), runs(model=ONE, **one, **INDEX))


def one_valid_token() -> None:
    """Runs in the ranks: each sample has a single token that counts, elsewhere in every sample."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def __getitem__(self: Any, idx: int) -> Any:
        sample = original(self, idx)
        mask = sample["loss_mask"]
        sample["loss_mask"] = torch.zeros_like(mask)
        sample["loss_mask"][7 * (idx or 0) % mask.numel()] = 1
        return sample

    GPTDataset.__getitem__ = __getitem__


@pytest.mark.feature("Loss: multi-token prediction, fewer valid tokens than ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_valid_tokens_than_ranks(runs: Runs, layout: str) -> None:
    before = ("test_fcp_mtp:one_valid_token",)
    reference = runs(model=TWO, context_parallel_backend="fcp", before=before, **INDEX)
    assert_equal(runs(2, TWO, before=before, **fcp(layout), **INDEX), reference)
