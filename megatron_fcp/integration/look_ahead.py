"""Planning ahead of need: batches are read early, and their plans made beside training.

::

    data loader -> [batch i+2 | batch i+1 | batch i] -> RerunDataIterator -> training
                        | boundaries, as soon as it is read
                        v
               planning process (plan_worker.py)      tensor-parallel peers (announce.py)

What is read early waits in order: training gets the same batches, errors and ends at the same places, Megatron's own
replay sees only what training was given, and a checkpoint counts the samples that training consumed.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_fcp.integration import batch as data
from megatron_fcp.integration import session
from megatron_fcp.integration.announce import Announcer
from megatron_fcp.integration.layouts import Boundaries, Layout
from megatron_fcp.integration.plan_worker import PlanWorker
from megatron_fcp.integration.session import Session


class LookAhead:
    """An iterator that has read up to ``depth`` items more than it gave.

    Parameters
    ----------
    source : iterator
        Read in the thread that asks. What it raises, the end included, is raised where it would have been without
        this; nothing is read past an error before that.
    depth : int
    notice : callable
        Called with each item when it is read.
    """

    def __init__(self, source: Iterator[Any], depth: int, notice: Callable[[Any], object]) -> None:
        self._source, self._depth, self._notice = source, depth, notice
        self._read: deque[Any] = deque()
        self._error: Exception | None = None

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Any:
        while self._error is None and len(self._read) <= self._depth:
            try:
                item = next(self._source)
            except Exception as error:  # StopIteration as well
                self._error = error
            else:
                self._read.append(item)
                self._notice(item)
        if self._read:
            return self._read.popleft()
        error, self._error = self._error, None
        assert error is not None
        raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class PlanAhead:
    """What a rank does so that plans are there before training asks for them.

    Parameters
    ----------
    run : Session
        Its layouts get a worker. All ranks of a tensor-parallel group make this together.
    """

    def __init__(self, run: Session) -> None:
        from megatron.core import parallel_state

        self._run = run
        self._rank: int = session.cp_group().rank()
        settings, layouts = run.settings, run.layouts

        def make(boundaries: Boundaries, rank: int) -> Layout:
            return Layout(boundaries, settings, rank).derived()

        self._worker = layouts.worker = PlanWorker(make, Layout.on_host, settings.config.timeout_s / 2)
        # Loads compiled code before the first batch comes.
        self._worker.submit(Boundaries.of_samples(1, settings.seq_length), self._rank)
        self._announcer: Announcer | None = None
        self._unannounced: list[Boundaries] = []
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            group: Any = parallel_state.get_tensor_model_parallel_group()
            ranks = torch.distributed.get_process_group_ranks(group)
            self._announcer = Announcer(ranks, self._expect, settings.config.timeout_s)
            layouts.settle = self._announcer.settle
        atexit.register(self.close)

    def read(self, item: Any) -> None:
        """Take notice of a batch that was read ahead; one that cannot be understood is left to when it is used."""
        boundaries = coming_boundaries(item, self._run)
        if boundaries is None:
            return
        self._expect(boundaries)
        if self._announcer is not None:
            self._unannounced.append(boundaries)

    def take_turn(self) -> None:
        """Tell, or hear, what was read ahead; every rank of a tensor-parallel group calls it once per batch."""
        if self._announcer is not None:
            self._announcer.take_turn(self._unannounced)
            self._unannounced.clear()

    def close(self) -> None:
        """End the process and the threads, and say how planning went."""
        atexit.unregister(self.close)
        self._report()
        self._run.layouts.worker = self._run.layouts.settle = None
        self._worker.close()
        if self._announcer is not None:
            self._announcer.close()

    def _report(self) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            print(f"> FCP on rank 0: {self._run.layouts.waits}", flush=True)

    def _expect(self, boundaries: Boundaries) -> None:
        self._run.layouts.expect(boundaries, self._rank)


def coming_boundaries(item: Any, run: Session) -> Boundaries | None:
    """Boundaries of a batch as the data loader gave it; None where they cannot be read. Leaves the batch alone."""
    try:
        own = dict(item)
        if run.settings.documents == "eod":
            data.add_boundaries(own, data.eod_token(run))
        padded = own.get("cu_seqlens_padded")
        offsets = own["cu_seqlens"] if padded is None else padded
        return Boundaries.of_packed(offsets, run.settings.seq_length)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def wrap_build_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: Megatron's data iterators read ahead, and what plans ahead begins."""

    def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider: Any) -> Any:
        iterators = original(build_train_valid_test_datasets_provider)
        run = session.current()
        if run is None or not run.settings.plan_ahead:
            return iterators
        if run.ahead is None:
            run.ahead = PlanAhead(run)
        for iterator in iterators:
            for one in iterator if isinstance(iterator, list) else [iterator]:
                if one is not None:  # a RerunDataIterator, which keeps what it gave
                    one.iterable = LookAhead(one.iterable, run.settings.plan_ahead, run.ahead.read)
        return iterators

    return build_train_valid_test_data_iterators
