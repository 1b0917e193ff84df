"""Ranks that get other batches, stall or die: all stop within 10 seconds, and say who and why (time-out 5 seconds)."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import pytest
from fcp_runs import EOD, fcp

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, tiny_model_args
from megatron_fcp.testing.pool import JobError

pytestmark = pytest.mark.megatron

TIMEOUT_S = 5
LIMIT_S = 10


def _say_when() -> None:
    print(f"failing at {time.monotonic()}", flush=True)


def other_samples() -> None:
    """Runs in the ranks: context-parallel rank 1 reads another sample from the third on."""
    if os.environ["RANK"] != "1":
        return
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original, count = GPTDataset.__getitem__, 0

    def __getitem__(self: Any, idx: int) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            _say_when()
        return original(self, idx + 1 if count >= 3 else idx)

    GPTDataset.__getitem__ = __getitem__


def other_cluster() -> None:
    """Runs in the ranks: rank 1 plans for a cluster of its own, as a GPU of another kind would have it."""
    if os.environ["RANK"] == "1":
        sys.argv += ["--fcp-hardware", "h200-ib"]
        _say_when()


def other_boundaries() -> None:
    """Runs in the ranks: rank 1 has the same tokens as the others, but one document boundary is missing."""
    if os.environ["RANK"] != "1":
        return
    from megatron.core import packed_seq_params

    original, count = packed_seq_params.PackedSeqParams.__post_init__, 0

    def __post_init__(self: Any) -> None:
        nonlocal count
        count += 1
        if count == 3 and self.cu_seqlens_q.numel() > 2:
            _say_when()
            self.cu_seqlens_q = self.cu_seqlens_q[[0, *range(2, self.cu_seqlens_q.numel())]]
        original(self)

    packed_seq_params.PackedSeqParams.__post_init__ = __post_init__


def _in_second_step(action: Any) -> None:
    from megatron.training import training

    original = training.train_step

    def train_step(*args: Any, iteration: int = 0, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1" and iteration == 1:
            _say_when()
            action()
        return original(*args, iteration=iteration, **kwargs)

    training.train_step = train_step


def stall() -> None:
    """Runs in the ranks: rank 1 sleeps."""
    _in_second_step(lambda: time.sleep(100))


def die() -> None:
    """Runs in the ranks: rank 1 is killed."""
    _in_second_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail(loop: TrainingLoop, fault: str, **flags: Any) -> tuple[JobError, float]:
    """Train three ranks with a fault; the error, and the seconds from the fault to the end of the last survivor."""
    wide = {"seq_length": 192, "max_position_embeddings": 192}
    data = {"mock_data": None, "data_path": loop.corpus().prefix}
    argv = tiny_model_args(**wide, **data, **fcp("reshuffle", 3, fcp_timeout=TIMEOUT_S), **flags)
    job = TrainingJob(argv, 3, before=[f"test_fcp_failures:{fault}"], grace=LIMIT_S, timeout=60)
    started = time.monotonic()
    with pytest.raises(JobError) as caught:
        loop.run(job)
    found = re.search(r"failing at (\S+)", caught.value.ranks[1].log)
    assert found, "the fault did not happen"
    last = max(rank.seconds for rank in caught.value.ranks if rank.rank != 1)
    return caught.value, started + last - float(found[1])


@pytest.mark.parametrize("flags", [{}, EOD], ids=["whole samples", "documents"])
def test_ranks_with_other_samples(training_loop: TrainingLoop, flags: dict[str, Any]) -> None:
    error, seconds = fail(training_loop, "other_samples", **flags)
    assert seconds < LIMIT_S
    for rank in error.ranks:
        assert rank.error.startswith("PlanMismatch")
        assert "rank 1 differs from ranks 0 and 2" in rank.error
        assert "the tokens of a batch" in rank.error


def test_ranks_that_plan_for_other_clusters(training_loop: TrainingLoop) -> None:
    error, _ = fail(training_loop, "other_cluster", fcp_hardware="h100-ib")
    for rank in error.ranks:
        assert rank.error.startswith("PlanMismatch")
        assert "for the settings that plans are made by: rank 1 differs from ranks 0 and 2; give every" in rank.error
        assert "name one cluster for all with --fcp-hardware" in rank.error


def test_ranks_with_other_boundaries(training_loop: TrainingLoop) -> None:
    error, seconds = fail(training_loop, "other_boundaries", **EOD)
    assert seconds < LIMIT_S
    for rank in error.ranks:
        assert rank.error.startswith("PlanMismatch")
        assert "rank 1 differs from ranks 0 and 2" in rank.error
        assert "the documents of a batch" in rank.error


def test_stalled_rank(training_loop: TrainingLoop) -> None:
    error, seconds = fail(training_loop, "stall")
    assert TIMEOUT_S <= seconds < LIMIT_S
    for rank in (error.ranks[0], error.ranks[2]):
        assert rank.error.startswith("FcpTimeout")
        assert "cause: rank 1 did not come" in rank.error


def test_killed_rank(training_loop: TrainingLoop) -> None:
    error, seconds = fail(training_loop, "die")
    assert seconds < LIMIT_S
    assert error.ranks[1].kind == "died"
    for rank in (error.ranks[0], error.ranks[2]):
        assert rank.error.startswith("PeerLost")
        assert "cause: rank 1 died" in rank.error
