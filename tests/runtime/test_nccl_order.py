"""What the communicator does where the device carries out the rounds: over gloo, with works that notice a wait.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for, a stream that waits holds up all others.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fcp.plan.program import Compute, Exchange
from megatron_fcp.runtime import Communicator, communicator
from megatron_fcp.runtime.attention import ForwardPass
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels.reference import Reference
from megatron_fcp.runtime.transport import Position
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.runtime


class Work:
    """A group call's work, as NCCL gives one: done when it is told so; remembers whether a stream waits for it."""

    def __init__(self, works: list[Any]) -> None:
        self.works, self.waited, self.done = works, False, False

    def wait(self, *timeout: object) -> None:
        assert not timeout, "a time-out makes the host wait"
        self.waited = True
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return self.done


def swap_as_on_a_gpu(comm: Communicator) -> list[Any]:
    """Two rounds to the right neighbour; what was waited for when, and what was overdue when."""
    works: list[Work] = []
    original = communicator.dist.batch_isend_irecv
    communicator.dist.batch_isend_irecv = lambda ops: [works.append(Work(original(ops))) or works[-1]]  # type: ignore
    devices: list[object] = []
    torch.cuda.device = lambda device: devices.append(device) or contextlib.nullcontext()  # type: ignore
    mine = Communicator(comm.group, 0.2, "in order", device="cuda:1", control=comm.control)
    mine.close()  # the watch would end this process
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = [torch.empty(3), torch.empty(3)]
    rounds = [mine.post([(right, torch.full((3,), 10.0 * comm.rank + i))], [(left, got[i])]) for i in range(2)]
    seen: list[Any] = [[w.waited for w in works]]
    rounds[1].wait_recvs()
    seen.append([w.waited for w in works])
    rounds[0].wait()
    seen.append([w.waited for w in works])
    works[0].done = True
    time.sleep(0.25)
    late = communicator._overdue_of(mine)
    works[1].done = True
    seen += [late is not None and late.startswith(f"on rank {comm.rank}, "), communicator._overdue_of(mine)]
    seen += [[float(t[0]) - 10.0 * left for t in got], set(map(str, devices))]
    return seen


def test_nothing_waits_for_a_round_but_what_needs_it(gloo: GlooPool) -> None:
    for seen in gloo.run(2, swap_as_on_a_gpu):
        assert seen[:3] == [[False, False], [False, True], [True, True]]
        assert seen[3:5] == [True, None]
        assert seen[5:] == [[0.0, 1.0], {"cuda:1"}]


class Recorder:
    """A transport of a lone rank that notes, in one list, what is posted and what is waited for."""

    def __init__(self, rank: int, size: int, in_order: bool, log: list[tuple[str, int]]) -> None:
        self.rank, self.size, self.in_order, self.position, self.log = rank, size, in_order, Position(), log

    def post(self, sends: Any, recvs: Any) -> Any:
        number = int(self.position.round.split()[-1])
        self.log.append(("post", number))
        for _, tensor in recvs:
            tensor.zero_()
        wait = lambda: self.log.append(("wait", number))  # noqa: E731
        return type("Round", (), {"wait": staticmethod(wait), "wait_recvs": staticmethod(wait)})()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_block_is_passed_on_without_a_wait_where_rounds_are_carried_out_in_order(in_order: bool) -> None:
    """Else a stream would wait for what has just been asked for, before it attends to what is here."""
    early = passed_on = 0
    for seed in range(40):
        rng = np.random.default_rng([7, seed])
        case = random_case(rng, max_cp_size=5)
        if case.cp_size < 3:
            continue
        plan = reroute(case.plan(), rng, share=0.8)
        for rank in range(case.cp_size):
            rank_plan = plan.rank_plan(rank)
            log: list[tuple[str, int]] = []
            x = torch.zeros(rank_plan.num_tokens, 1, 4)
            comm = Recorder(rank, case.cp_size, in_order, log)
            ForwardPass(x, x, x, CompiledPlan(rank_plan), comm, Reference(), 1.0).run()
            pulls = [s for s in rank_plan.forward if isinstance(s, Exchange)]
            passed_on += sum(s.buffer > 0 for p in pulls for t in p.sends for s in t.segments)
            before = next((i for i, s in enumerate(rank_plan.forward) if isinstance(s, Compute)), 0)
            first = [entry for entry in log][: sum(isinstance(s, Exchange) for s in rank_plan.forward[:before])]
            early += sum(kind == "wait" for kind, _ in first)
    assert passed_on > 20
    assert (early == 0) == in_order
