"""Rounds over torch.distributed: order, bounded group calls, warm-up, agreement."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fcp.runtime import Communicator, PlanMismatch, communicator
from megatron_fcp.runtime.rounds import MAX_OPS_PER_PEER, bounded
from megatron_fcp.runtime.watch import Board, RankState, explain
from megatron_fcp.testing.gloo_pool import GlooPool

pytestmark = pytest.mark.runtime

MANY = 5 * MAX_OPS_PER_PEER + 7


def swap_many(comm: Communicator) -> tuple[bool, int]:
    """Every rank sends MANY small tensors to its right neighbour in one round, some of them empty."""
    calls: list[int] = []
    original = communicator.dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> list[dist.Work]:
        calls.append(max(Counter((op.op, op.peer) for op in ops).values()))
        return original(ops)

    communicator.dist.batch_isend_irecv = counted
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = [i % 5 for i in range(MANY)]
    sends = [(right, torch.full((n,), 1000.0 * comm.rank + i)) for i, n in enumerate(sizes)]
    recvs = [(left, torch.empty(n)) for n in sizes]
    comm.post(sends, recvs).wait()
    right_values = all((t == 1000 * left + i).all() for i, (_, t) in enumerate(recvs))
    return right_values, max(calls)


def test_a_large_round_is_cut_into_bounded_group_calls(gloo: GlooPool) -> None:
    for right_values, largest in gloo.run(3, swap_many):
        assert right_values
        assert largest == MAX_OPS_PER_PEER


def test_both_sides_cut_a_round_at_the_same_places() -> None:
    """A sends to B and C and receives from D; B only receives: what A and B share is in group calls of equal number."""
    one = torch.empty(1)
    a = bounded([(1, one), (2, one)] * 150, [(3, one)] * 70)
    b = bounded([], [(0, one)] * 150)
    per_call_a = [sum(peer == 1 for peer, _ in sends) for sends, _ in a]
    per_call_b = [len(recvs) for _, recvs in b]
    assert per_call_a == per_call_b == [64, 64, 22]
    assert [len(recvs) for _, recvs in a] == [64, 6, 0]


def warm_then_agree(comm: Communicator) -> tuple[str, list[int]]:
    comm.warm_up()
    comm.agree("same", "the plan of batch 0")
    comm.agree("also the same")
    return str(comm.position), comm.global_ranks


@pytest.mark.parametrize("size", [1, 2, 5])
def test_warm_up_and_agreement(gloo: GlooPool, size: int) -> None:
    for position, ranks in gloo.run(size, warm_then_agree):
        assert ranks == list(range(size))
        assert position.startswith("agreement 2 on plan" if size > 1 else "warm-up")


def groups_of_two(comm: Communicator) -> tuple[list[int], float]:
    """Two context-parallel groups in one job, each with its own digest."""
    members = [1, 3] if comm.rank % 2 else [0, 2]
    mine = Communicator.create(members, 10.0, "cp")
    mine.agree(f"group {members}")
    got = torch.empty(1)
    mine.post([(1 - mine.rank, torch.tensor([float(comm.rank)]))], [(1 - mine.rank, got)]).wait()
    mine.close()
    return [mine.rank, *mine.global_ranks], float(got)


def test_groups_are_apart_and_number_their_ranks(gloo: GlooPool) -> None:
    assert gloo.run(4, groups_of_two) == [([0, 0, 2], 2.0), ([0, 1, 3], 3.0), ([1, 0, 2], 0.0), ([1, 1, 3], 1.0)]


def test_ranks_that_torch_would_reorder_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the ranks of a group must ascend, got \[3, 1\]"):
        Communicator.create([3, 1], 1.0)


def fail_then_go_on(comm: Communicator) -> list[str]:
    messages = []
    for attempt in (lambda: comm.agree(f"digest {comm.rank % 2}"), lambda: comm.post([], []), lambda: comm.agree("x")):
        try:
            attempt()
        except PlanMismatch as error:
            messages.append(str(error))
    return messages


def test_a_failed_communicator_refuses_further_use(gloo: GlooPool) -> None:
    for messages in gloo.run(4, fail_then_go_on):
        assert len(messages) == 3
        assert "ranks 1 and 3 differ from ranks 0 and 2" in messages[0]
        assert messages[1].startswith("this communicator failed before: ")


def state(rank: int, doing: str, **more: object) -> RankState:
    return RankState(rank, doing, "forward of attention, step 2 of 9", **more)  # type: ignore[arg-type]


def test_explain_names_dead_silent_and_busy_ranks() -> None:
    waits = {r: state(r, "waits", waits_for=[2], transfer="receive from rank 2", seconds=5.0) for r in (0, 1)}
    assert "cause: rank 2 gave no sign of life: stopped, hung" in explain(waits, [0, 1, 2])
    lost = {**waits, 0: state(0, "waits", waits_for=[2], transfer="send to rank 2", lost=[2])}
    assert "cause: rank 2 died (connection closed" in explain(lost, [4, 5, 6])
    assert "rank 2 (global rank 6) gave no sign of life" in explain(lost, [4, 5, 6])
    stuck = {**waits, 2: state(2, "busy", seconds=6.0)}
    assert "cause: rank 2 did not come" in explain(stuck, [0, 1, 2])
    passing = {**stuck, 1: state(1, "busy", seconds=0.1), 0: state(0, "waits", waits_for=[1, 2])}
    assert "cause: rank 2 did not come" in explain(passing, [0, 1, 2]), "rank 1 was between two transfers"
    circle = {r: state(r, "waits", waits_for=[1 - r]) for r in (0, 1)}
    assert "every rank is alive and waits for another one" in explain(circle, [0, 1])


def test_the_board_survives_the_loss_of_its_store() -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise ConnectionError("gone")

    board = Board(Broken(), 0, 2)  # type: ignore[arg-type]
    board.raise_alarm()
    board.post(state(0, "busy"))
    assert not board.alarm()
    assert not board.reachable
    assert board.collect(5.0) == {}


def asked_of_torch(_: Communicator) -> list[tuple[float, float]]:
    """Seconds that torch's own groups may take, and what FCP may take in all, for several time-outs."""
    asked: list[float] = []
    original = communicator.make_groups

    def make_groups(ranks: Any, setup_s: float, *rest: Any) -> Any:
        asked.append(setup_s)
        return original(ranks, setup_s, *rest)

    communicator.make_groups = make_groups
    ours: list[float] = []
    for seconds in (5.0, 600.0, 3600.0):
        comm = Communicator.create([0], seconds, "asked")
        comm.close()
        ours.append(seconds + comm._watch._interval + comm._watch._grace)
    return list(zip(asked, ours, strict=True))


def test_fcps_report_comes_before_torchs_own_timeout(gloo: GlooPool) -> None:
    for torchs, ours in gloo.run(1, asked_of_torch)[0]:
        assert torchs > ours + 10
