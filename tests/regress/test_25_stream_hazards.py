"""Buffers read before they have come, written before they have left, or freed in between, hidden by a serialised test.

https://github.com/cornstarch-org/Cornstarch/pull/77 (both hazards of the dKV buffers came out once a workaround that
only the tests had was dropped). ``tests/gpu/test_streams.py`` makes real streams sleep; here the copy of each message
happens at the earliest or at the very last moment that the protocol of waits allows, and memory that nobody holds by
then is lost.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fcp.plan import Plan
from megatron_fcp.runtime.buffers import DKVBuffers, KVBuffers
from megatron_fcp.runtime.transport import Message, Position
from megatron_fcp.testing.attention_check import (
    TOLERANCE,
    Model,
    RankResult,
    gather,
    largest_errors,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.runtime

MODEL = Model(num_heads=2, num_kv_heads=1, head_dim_qk=4, head_dim_v=4)
TIMEOUT_S = 60.0


class Hazard(AssertionError):
    """Memory of a message was gone before the message was through."""


class Place:
    """Where a tensor lies, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        if self._storage.expired():
            raise Hazard("a tensor was dropped while its message was under way")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)  # type: ignore[call-overload]


class Group:
    """What the ranks share; ``late(n)`` says whether the n-th message of a pair is copied at the last moment."""

    def __init__(self, size: int, late: Callable[[int], bool]) -> None:
        self.size, self.late = size, late
        self.changed = threading.Condition()
        self.ends: dict[tuple[int, int], tuple[list[Place], list[Place]]] = defaultdict(lambda: ([], []))
        self.through: set[tuple[int, int, int]] = set()
        self.failure: BaseException | None = None

    def post(self, pair: tuple[int, int], side: int, tensor: torch.Tensor) -> int:
        """Add one end of a message; returns its number in the pair."""
        ends = self.ends[pair]
        ends[side].append(Place(tensor.detach()))
        number = len(ends[side]) - 1
        if len(ends[1 - side]) > number and not self.late(number):
            self._copy(pair, number)
        self.changed.notify_all()
        return number

    def finish(self, pair: tuple[int, int], number: int) -> None:
        """Wait for one message."""
        if self.late(number):
            time.sleep(0.001)  # the other ranks go on as far as they can
        with self.changed:
            there = self.changed.wait_for(
                lambda: self.failure or all(len(end) > number for end in self.ends[pair]), TIMEOUT_S
            )
            assert there, f"message {number} of {pair} has only one end"
            if self.failure is None:
                self._copy(pair, number)

    def _copy(self, pair: tuple[int, int], number: int) -> None:
        if (*pair, number) not in self.through:
            source, target = (end[number].tensor() for end in self.ends[pair])
            target.copy_(source)
            self.through.add((*pair, number))


class Pending:
    def __init__(self, group: Group, sends: list[Any], recvs: list[Any]) -> None:
        self._group, self._sends, self._recvs = group, sends, recvs

    def wait_recvs(self) -> None:
        while self._recvs:
            self._group.finish(*self._recvs.pop(0))

    def wait(self) -> None:
        self.wait_recvs()
        while self._sends:
            self._group.finish(*self._sends.pop(0))


class Adversary:
    """One rank's end; a :class:`megatron_fcp.runtime.transport.Transport`."""

    in_order = False

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size, self.position = group, rank, group.size, Position()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        with self.group.changed:
            for _, tensor in recvs:
                tensor.fill_(torch.nan)  # undefined until the round is through
            into = [((peer, self.rank), self.group.post((peer, self.rank), 1, tensor)) for peer, tensor in recvs]
            out = [((self.rank, peer), self.group.post((self.rank, peer), 0, tensor)) for peer, tensor in sends]
        return Pending(self.group, out, into)


def attend(plan: Plan, late: Callable[[int], bool]) -> list[RankResult]:
    """All ranks of ``plan`` as threads."""
    x = random_inputs(plan, MODEL, 0)
    group = Group(plan.cp_size, late)
    results: list[Any] = [None] * plan.cp_size

    def work(rank: int) -> None:
        try:
            results[rank] = run_rank(Adversary(group, rank), plan, MODEL, x)
        except BaseException as error:
            with group.changed:
                group.failure = group.failure or error
                group.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(plan.cp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.failure is not None:
        raise group.failure
    return results


def plans(count: int) -> list[Plan]:
    """Plans of two to five ranks; every second one forwards blocks and cuts stages at random."""
    out: list[Plan] = []
    seed = 0
    while len(out) < count:
        rng = np.random.default_rng([25, seed])
        seed += 1
        case = random_case(rng, max_cp_size=5)
        if case.cp_size > 1:
            plan = case.plan()
            if len(plan.schedule.messages) > 3:
                out.append(reroute(plan, rng, share=0.8) if len(out) % 2 else plan)
    return out


def check(plan: Plan) -> None:
    want = right_answer(plan, MODEL, random_inputs(plan, MODEL, 0))
    orders: list[Callable[[int], bool]] = [lambda n: False, lambda n: True, lambda n: n % 2 == 0, lambda n: n % 3 == 1]
    first = None
    for late in orders:
        got = gather(attend(plan, late), want)
        assert max(largest_errors(plan, got, want).values()) < TOLERANCE
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got.tensors(), first.tensors())), "the order changed bits"


def check_all() -> None:
    for plan in plans(16):
        check(plan)


def test_no_order_of_copies_changes_a_bit() -> None:
    check_all()


def _unwaited(name: str) -> Callable[..., Any]:
    """A method as it would be without its wait."""
    no_wait = type("Never", (), {"wait": lambda self: None, "wait_recvs": lambda self: None})()

    def get(self: KVBuffers, buffer: int) -> Any:
        return self._buffers[buffer]

    def pull(self: KVBuffers, exchange: Any) -> None:
        arrived, self._awaited.arrived = self._awaited.arrived, lambda buffer: None  # type: ignore[method-assign]
        KV_PULL(self, exchange)
        self._awaited.arrived = arrived  # type: ignore[method-assign]

    def reduce(self: DKVBuffers, round_: int) -> None:
        self._staged[round_] = (no_wait, self._staged[round_][1])
        DKV_REDUCE(self, round_)

    def release(self: DKVBuffers, buffer: int) -> None:
        self._leaving.pop(buffer, ())
        DKV_RELEASE(self, buffer)

    return {"get": get, "pull": pull, "reduce": reduce, "release": release}[name]


KV_PULL, DKV_REDUCE, DKV_RELEASE = KVBuffers.pull, DKVBuffers.reduce, DKVBuffers.release


@pytest.mark.parametrize(
    ("owner", "name"), [(KVBuffers, "get"), (KVBuffers, "pull"), (DKVBuffers, "reduce"), (DKVBuffers, "release")]
)
def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """NaN that was read too early, a partial sum that left too late, or memory that was gone."""
    monkeypatch.setattr(owner, name, _unwaited(name))
    with pytest.raises(AssertionError):
        check_all()
