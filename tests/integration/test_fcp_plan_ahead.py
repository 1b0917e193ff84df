"""Planning ahead of need: training never waits for a plan, and gets the batches that it would get without."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingLoop, TrainingResult
from megatron_fcp.testing.pool import JobError

pytestmark = pytest.mark.megatron

STEPS, BATCHES_PER_STEP = 4, 4


def watch() -> None:
    """Runs in the ranks: notes what the training thread found when it asked for plans."""
    from megatron_fcp.integration import session
    from megatron_fcp.testing.loop_rank import note

    begin = session.begin

    def begin_and_note(settings: Any) -> Any:
        run = begin(settings)
        note("waits", run.layouts.waits)
        return run

    session.begin = begin_and_note


def lose_the_process() -> None:
    """Runs in the ranks: the planning process is killed as soon as there is one."""
    watch()
    from megatron_fcp.integration.plan_worker import PlanWorker

    start = PlanWorker.__init__

    def start_and_kill(self: Any, *args: Any) -> None:
        start(self, *args)
        os.kill(self._process.pid, signal.SIGKILL)

    setattr(PlanWorker, "__init__", start_and_kill)  # noqa: B010


def assert_ahead(result: TrainingResult) -> None:
    """Nothing was planned by the training thread, and it waited for the first batch at most."""
    for rank in result.ranks:
        waits = rank.notes["waits"]
        assert waits.planned == 0
        assert waits.waited <= 1
        assert waits.ready >= 5  # the corpus has samples without boundaries, whose plan is made once


@pytest.mark.feature("Schedule: plans made ahead of need")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_never_waits_for_a_plan(runs: Runs, layout: str) -> None:
    flags = {**fcp(layout, 4), **EOD, "train_iters": STEPS}
    ahead = runs(4, **flags, timing_log_level=1, before=("test_fcp_plan_ahead:watch",))
    assert_ahead(ahead)
    assert ahead.ranks[-1].log.count("fcp-plan-wait") == STEPS  # Megatron's timers, shown by the last rank
    in_training = runs(4, **flags, fcp_plan_ahead=0, before=("test_fcp_plan_ahead:watch",))
    for rank, expected in zip(in_training.ranks, ahead.ranks, strict=True):
        found, asked = rank.notes["waits"], expected.notes["waits"]
        assert (found.ready, found.waited) == (0, 0)
        assert found.planned == asked.ready + asked.waited
    assert ahead.losses == in_training.losses  # the same plans, bit for bit, for the same batches
    for name, gradient in in_training.gradients.items():
        np.testing.assert_array_equal(ahead.gradients[name], gradient, err_msg=name)


@pytest.mark.feature("Schedule: plans made ahead of need", layout="resident")
def test_ranks_without_data_plan_ahead_as_well(runs: Runs) -> None:
    flags = {**fcp("resident"), **INDEX, **SPLIT_TENSORS, "train_iters": STEPS}
    assert_ahead(runs(4, **flags, before=("test_fcp_plan_ahead:watch",)))


def test_training_goes_on_without_the_planning_process(runs: Runs) -> None:
    flags = {**fcp("reshuffle"), **EOD}
    result = runs(2, **flags, before=("test_fcp_plan_ahead:lose_the_process",))
    assert result.losses == runs(2, **flags).losses
    for rank in result.ranks:
        assert rank.notes["waits"].planned >= 5
        assert rank.log.count("planning process ended") == 1


def replay_and_evaluate() -> None:
    """Runs in the ranks: every step is run twice, from the batches that Megatron's data iterator kept."""
    watch()
    from megatron.core.rerun_state_machine import RerunStateMachine

    ask = RerunStateMachine.should_run_forward_backward
    state = {"again": False}

    def twice(self: Any, data_iterator: Any) -> bool:
        if state["again"]:
            state["again"] = False
            iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
            assert all(len(one.saved_microbatches) == BATCHES_PER_STEP for one in iterators)
            for one in iterators:
                one.rewind()
            return True
        state["again"] = ask(self, data_iterator)
        return state["again"]

    RerunStateMachine.should_run_forward_backward = twice


def test_replay_and_evaluation_see_the_same_batches(runs: Runs) -> None:
    """A replay gives the batches that training was given, not those that were read ahead; evaluation has its own."""
    flags = {**fcp("resident"), **EOD, "split": "80,20,0", "eval_iters": 2, "eval_interval": 1}
    flags |= {"rerun_mode": "validate_results", "before": ("test_fcp_plan_ahead:replay_and_evaluate",)}
    ahead, in_training = (runs(2, **flags, fcp_plan_ahead=depth) for depth in (3, 0))
    assert ahead.losses == in_training.losses

    def evaluated(result: TrainingResult) -> list[str]:
        return [line.split("|")[1] for line in result.ranks[-1].log.splitlines() if " validation loss at " in line]

    assert evaluated(ahead) == evaluated(in_training)
    assert len(evaluated(ahead)) >= 3


def break_a_batch() -> None:
    """Runs in the ranks: the data set's sixth sample says that a document begins before the stream does."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    read, count = GPTDataset.__getitem__, itertools.count(1)

    def __getitem__(self: Any, index: int | None) -> Any:
        sample = read(self, index)
        if next(count) == 6:
            sample["cu_seqlens"] = sample["cu_seqlens"] + 3
        return sample

    setattr(GPTDataset, "__getitem__", __getitem__)  # noqa: B010


def test_bad_boundaries_stop_all_ranks_when_their_batch_is_used(runs: Runs) -> None:
    flags = {**fcp("reshuffle"), **INDEX}
    with pytest.raises(JobError) as failed:
        runs(2, **flags, before=("test_fcp_plan_ahead:break_a_batch",))
    assert len(failed.value.errors) == 2
    for rank in failed.value.ranks:
        assert "cu_seqlens must begin with 0" in rank.error
    assert "iteration        1/" in failed.value.ranks[-1].log  # four batches went before


class Faulty:
    """Gives 1, 3, 4, ... and fails in between."""

    name = "a user's iterator"
    at = 0

    def __iter__(self) -> Faulty:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 2:
            raise OSError("disk")
        return self.at


def read_ahead(_: object) -> dict[str, Any]:
    """Runs in a rank: the iterator by itself."""
    from megatron_fcp.integration.look_ahead import LookAhead

    seen: list[int] = []
    ahead = LookAhead(iter(range(4)), 2, seen.append)
    order = [(next(ahead), list(seen)) for _ in range(4)]
    ends = [next(ahead, "end") for _ in range(2)]

    faulty = LookAhead(Faulty(), 3, lambda _: None)
    found: list[Any] = []
    for _ in range(4):
        try:
            found.append(next(faulty))
        except OSError as error:
            found.append(str(error))
    return {"order": order, "ends": ends, "found": found, "name": faulty.name}


def test_iterator_reads_ahead(training_loop: TrainingLoop) -> None:
    result = training_loop.call("test_fcp_plan_ahead:read_ahead", None)
    assert result["order"] == [(0, [0, 1, 2]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])]
    assert result["ends"] == ["end", "end"]
    assert result["found"] == [1, "disk", 3, 4]  # an error comes in its turn, and what follows it is not lost
    assert result["name"] == "a user's iterator"  # a loader that saves its state is still found


def double(value: int) -> int:
    """What the worker makes of a request: fails for negative numbers, sleeps on 99."""
    if value < 0:
        raise ValueError("negative")
    if value == 99:
        time.sleep(60)
    return 2 * value


def work(_: object) -> dict[str, Any]:
    """Runs in a rank: the worker by itself."""
    from megatron_fcp.integration.plan_worker import PlanWorker

    finished: list[int] = []
    worker = PlanWorker(double, finished.append, patience_s=1.0)
    pid = worker._process.pid
    answers = [worker.result(f) for f in [worker.submit(1), worker.submit(-1), worker.submit(3)]]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        answers.append(worker.result(worker.submit(99)))
        answers.append(worker.result(worker.submit(5)))
    worker.close()
    alive = os.path.exists(f"/proc/{pid}")
    return {"answers": answers, "finished": finished, "told": [str(w.message) for w in told], "alive": alive}


def stopped(_: object) -> dict[str, Any]:
    """Runs in a rank: a worker that somebody stopped, as a debugger or a frozen control group does."""
    from megatron_fcp.integration.plan_worker import PlanWorker

    worker = PlanWorker(double, lambda value: None, patience_s=0.5)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    answer = worker.result(worker.submit(1))
    closed = threading.Thread(target=worker.close, daemon=True)
    closed.start()
    closed.join(10)
    ended = not closed.is_alive()
    if not ended:
        os.kill(worker.pid, signal.SIGKILL)
    return {"answer": answer, "ended": ended}


@pytest.mark.filterwarnings("ignore:FCP's planning process did not answer")
def test_a_stopped_worker_is_ended(training_loop: TrainingLoop) -> None:
    assert training_loop.call("test_fcp_plan_ahead:stopped", None) == {"answer": None, "ended": True}


def test_worker(training_loop: TrainingLoop) -> None:
    result = training_loop.call("test_fcp_plan_ahead:work", None)
    assert result["answers"] == [2, None, 6, None, None]
    assert result["finished"] == [2, 6]
    assert [("did not answer for 1 s" in text) for text in result["told"]] == [True]
    assert not result["alive"]


def announced(_: object) -> dict[str, Any]:
    """Runs in a rank: boundaries as a message, and back."""
    import torch

    from megatron_fcp.integration.announce import packed, unpacked
    from megatron_fcp.integration.layouts import Boundaries

    pair = [Boundaries.of_packed(torch.tensor([[0, 3, 8, 8], [0, 8, 8, 8]]), 8), Boundaries.of_samples(2, 8)]
    again = unpacked(packed(pair))
    return {
        "keys": [a.key == b.key for a, b in zip(pair, again, strict=True)],
        "offsets": pair[0].offsets.tolist(),
    }


def test_message_carries_boundaries(training_loop: TrainingLoop) -> None:
    result = training_loop.call("test_fcp_plan_ahead:announced", None)
    assert result["keys"] == [True, True]
    assert result["offsets"] == [0, 3, 8, 16]


def depths(cases: list[dict[str, Any]]) -> list[int | str]:
    """Runs in a rank: micro-batches read ahead on some command lines, or what is said about them."""
    from argparse import Namespace

    from megatron_fcp.integration.settings import plan_ahead_of

    flags = {"sft": False, "dataloader_inter_document_masking": True, "dataloader_type": "single"}
    found: list[int | str] = []
    for case in cases:
        try:
            found.append(plan_ahead_of(Namespace(**{**flags, "fcp_plan_ahead": None, **case})))
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_is_read_ahead(training_loop: TrainingLoop) -> None:
    external = {"dataloader_type": "external"}
    samples = {"dataloader_inter_document_masking": False, "reset_attention_mask": False}
    cases = [{}, {"fcp_plan_ahead": 5}, samples, external, {**external, "fcp_plan_ahead": 1}]
    # A data loader that saves its state (an argument of scripts that have one) would save one that is too far.
    cases += [{**external, "dataloader_save": "there", "fcp_plan_ahead": 1}, {"fcp_plan_ahead": -1}]
    *numbers, saved, negative = training_loop.call("test_fcp_plan_ahead:depths", cases)
    assert numbers == [2, 5, 0, 0, 1]
    for text in ("--fcp-plan-ahead 1", "--dataloader-save", "drop --fcp-plan-ahead"):
        assert text in saved
    assert "--fcp-plan-ahead -1 must be at least 0" in negative
