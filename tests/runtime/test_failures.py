"""A rank killed, stopped, stuck elsewhere, or fed another batch: every survivor ends in time and names it."""

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.runtime import Communicator
from megatron_fcp.testing.attention_check import Model, random_inputs, run_rank
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.pool import JobError, RankFailure

pytestmark = pytest.mark.runtime

FCP_TIMEOUT_S = 5.0
LIMIT_S = 10.0
SIZE, CULPRIT = 4, 2


def a_plan(length: int = 60) -> Plan:
    return make_plan([length], cp_size=SIZE, tokens_per_rank=16, config=FcpConfig(block_size=4))


def attend(comm: Communicator, plan: Plan, layers: int = 1) -> None:
    model = Model()
    x = random_inputs(plan, model, 0)
    for _ in range(layers):
        run_rank(comm, plan, model, x)


def misbehave() -> None:
    print(f"misbehaves at {time.monotonic()}", flush=True)


def train_until_rank_fails(comm: Communicator, what: str) -> None:
    """Three good layers, then rank CULPRIT stops taking part while the others go on."""
    comm.agree(a_plan().digest, "the plan of batch 1")
    attend(comm, a_plan(), layers=3)
    if comm.rank == CULPRIT:
        misbehave()
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "crashed":
            os._exit(1)
        assert what == "stuck"
        time.sleep(60)
    attend(comm, a_plan(), layers=50)


def skip_the_agreement(comm: Communicator) -> None:
    if comm.rank == CULPRIT:
        misbehave()
        time.sleep(60)
    comm.agree(a_plan().digest, "the plan of batch 1")


def another_batch(comm: Communicator) -> None:
    if comm.rank == CULPRIT:
        misbehave()
    comm.note = f"batch read from shard {comm.rank}"
    comm.agree(a_plan(60 if comm.rank != CULPRIT else 59).digest, "the plan of batch 7")
    attend(comm, a_plan())


def one_batch_ahead(comm: Communicator) -> None:
    """Equal plans, but rank CULPRIT has agreed on one before: its batches are shifted."""
    comm.agree("x")
    if comm.rank == CULPRIT:
        misbehave()
        comm._agreements += 1
    comm.agree(a_plan().digest, "the plan of batch 2")


def host_of_the_store_dies(comm: Communicator) -> None:
    """As when rank 0 of a job without an agent hosts the key-value store: a second communicator over such a store."""
    info = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == CULPRIT else None
    port = torch.tensor([info.port if info is not None else 0])
    dist.broadcast(port, CULPRIT)
    store = info or TCPStore("127.0.0.1", int(port), is_master=False)
    other = Communicator(comm.group, FCP_TIMEOUT_S, "other", store=store)
    comm.close()
    attend(other, a_plan())
    if comm.rank == CULPRIT:
        misbehave()
        os.kill(os.getpid(), signal.SIGKILL)
    attend(other, a_plan(), layers=50)


def one_layer_more(comm: Communicator) -> None:
    """Rank CULPRIT runs fewer layers and ends."""
    attend(comm, a_plan(), layers=1)
    if comm.rank == CULPRIT:
        misbehave()
        os._exit(0)
    attend(comm, a_plan(), layers=1)


@dataclass
class Ends:
    """How a job ended: each rank's failure and the seconds from the culprit's misbehaviour to each rank's end."""

    ranks: dict[int, RankFailure]
    seconds: dict[int, float]

    @property
    def survivors(self) -> list[RankFailure]:
        return [failure for rank, failure in self.ranks.items() if rank != CULPRIT]


def run(gloo: GlooPool, function: Any, *args: Any) -> Ends:
    gloo.run(1, nothing)  # the server is up: a job starts at once
    start = time.monotonic()
    with pytest.raises(JobError) as caught:
        gloo.run(SIZE, function, *args, timeout=60, fcp_timeout_s=FCP_TIMEOUT_S, grace=4.0)
    ranks = {failure.rank: failure for failure in caught.value.ranks}
    misbehaved = re.search(r"misbehaves at ([0-9.]+)", ranks[CULPRIT].log)
    assert misbehaved is not None, ranks[CULPRIT]
    return Ends(ranks, {rank: f.seconds - (float(misbehaved[1]) - start) for rank, f in ranks.items()})


def nothing(comm: Communicator) -> None:
    pass


def cause(failure: RankFailure) -> str:
    """The line that names the cause, from what the rank raised or its watch printed."""
    lines = (failure.details + "\n" + failure.log).splitlines()
    return next((line for line in lines if line.startswith("cause:")), f"no cause named in:\n{failure}")


def check_survivors(ends: Ends, words: str) -> None:
    """Every survivor ended by itself, with an error, in time, and says who the cause is."""
    assert len(ends.survivors) == SIZE - 1
    for failure in ends.survivors:
        assert failure.kind in ("raised", "died"), failure
        assert ends.seconds[failure.rank] < LIMIT_S, (ends.seconds, failure)
        assert words in cause(failure), failure
        if failure.kind == "raised":
            assert failure.error.startswith(("FcpTimeout", "PeerLost", "PlanMismatch")), failure
            assert f"on rank {failure.rank}" in failure.details
            if "of attention" in failure.error:
                assert "as rank" in failure.details, "the report shows the rank's part of the plan"
                assert len(re.findall(r"^> \d+ ", failure.details, re.MULTILINE)) > 0, failure


@pytest.mark.parametrize("what", ["killed", "crashed"])
def test_a_dead_rank_is_named_by_every_survivor(gloo: GlooPool, what: str) -> None:
    ends = run(gloo, train_until_rank_fails, what)
    check_survivors(ends, f"rank {CULPRIT} died")
    assert max(ends.seconds[f.rank] for f in ends.survivors) < FCP_TIMEOUT_S, "a broken connection is known at once"


def test_a_stopped_rank_is_named_by_every_survivor(gloo: GlooPool) -> None:
    check_survivors(run(gloo, train_until_rank_fails, "stopped"), f"rank {CULPRIT} gave no sign of life")


def test_a_rank_stuck_elsewhere_is_named_and_ended(gloo: GlooPool) -> None:
    ends = run(gloo, train_until_rank_fails, "stuck")
    check_survivors(ends, f"rank {CULPRIT} did not come")
    stuck = ends.ranks[CULPRIT]
    assert stuck.kind == "died", "the watch ends a process whose main thread does not come back"
    assert ends.seconds[CULPRIT] < LIMIT_S
    assert f"rank {CULPRIT} did not come" in cause(stuck)


def test_a_rank_that_never_agrees_is_named(gloo: GlooPool) -> None:
    check_survivors(run(gloo, skip_the_agreement), f"rank {CULPRIT} did not come")


def test_a_rank_that_ends_early_is_named(gloo: GlooPool) -> None:
    check_survivors(run(gloo, one_layer_more), f"rank {CULPRIT} died (connection closed, no sign of life)")


def test_another_batch_is_refused_by_every_rank_before_any_transfer(gloo: GlooPool) -> None:
    ends = run(gloo, another_batch)
    for failure in ends.ranks.values():
        assert failure.kind == "raised", failure
        assert failure.error.startswith("PlanMismatch"), failure
        assert f"rank {CULPRIT} differs from ranks 0, 1 and 3" in failure.details
        assert "the plan of batch 7" in failure.details
        for rank in range(SIZE):
            assert f"batch read from shard {rank}" in failure.details
        assert ends.seconds[failure.rank] < FCP_TIMEOUT_S


def test_a_rank_one_batch_ahead_is_refused_by_every_rank(gloo: GlooPool) -> None:
    ends = run(gloo, one_batch_ahead)
    for failure in ends.ranks.values():
        assert failure.error.startswith("PlanMismatch"), failure
        assert f"rank {CULPRIT} differs" in failure.details


def test_the_store_dies_with_the_rank_that_hosts_it(gloo: GlooPool) -> None:
    """Then nobody can ask anybody, and the message says so beside the peer it waited for."""
    ends = run(gloo, host_of_the_store_dies)
    for failure in ends.survivors:
        assert failure.error.startswith(("FcpTimeout", "PeerLost")), failure
        assert f"rank {CULPRIT}" in cause(failure) or "job's store" in cause(failure), failure
        assert ends.seconds[failure.rank] < LIMIT_S
