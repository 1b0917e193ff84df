"""The loss is the mean over all valid tokens, whichever ranks hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fcp_runs import EOD, LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron


def _mask_labels(change: Callable[[Any, int], Any]) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def __getitem__(self: Any, idx: int) -> Any:
        sample = original(self, idx)
        change(sample["loss_mask"], int(idx))
        return sample

    GPTDataset.__getitem__ = __getitem__


# These run in the ranks, on one rank as on several.
def every_other_sample() -> None:
    """Half of the micro-batches have no valid label at all."""
    _mask_labels(lambda mask, number: mask.mul_(number % 2))


def one_token() -> None:
    """One rank of the group holds the only valid label."""
    _mask_labels(lambda mask, number: (mask[:5].zero_(), mask[6:].zero_()))


def first_eighth() -> None:
    """Valid labels lie together, as after a prompt."""
    _mask_labels(lambda mask, number: mask[len(mask) // 8 :].zero_())


def second_half() -> None:
    """As many valid labels as masked ones."""
    _mask_labels(lambda mask, number: mask[: len(mask) // 2].zero_())


@pytest.mark.feature("Loss: valid labels unevenly on the ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean of micro-batches", "per token"])
@pytest.mark.parametrize("mask", [every_other_sample, one_token, first_eighth, second_half])
def test_valid_labels_anywhere(runs: Runs, mask: Callable[[], None], per_token: bool, layout: str) -> None:
    before = (f"{mask.__module__}:{mask.__name__}",)
    flags = {"calculate_per_token_loss": per_token, "before": before, **EOD, "train_iters": 2}
    difference = compare(runs(2, **fcp(layout), **flags), runs(**flags))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
