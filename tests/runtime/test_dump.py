"""A rank's steps in words, as reports show them."""

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.program import Compute, Exchange, Reduce, Release, Segment, Transfer
from megatron_fcp.runtime.dump import MAX_LINES, describe_steps
from megatron_fcp.runtime.transport import Position

pytestmark = pytest.mark.runtime


def test_every_kind_of_step() -> None:
    two, three = Segment(0, 0, 2), Segment(1, 4, 7)
    steps = (
        Exchange("pull", 0, (Transfer(1, (two,)),), (Transfer(2, (two, three)),)),
        Compute(0),
        Compute(2),
        Exchange("push", 5, (), (Transfer(3, (three,)),)),
        Reduce(5),
        Release("dkv", 2),
    )
    assert describe_steps(Position("backward", step=3, steps=steps)).splitlines() == [
        "  1  pull round 0: send 2 tokens to rank 1, receive 5 tokens from rank 2",
        "  2  attend to what is local",
        "  3  attend to stage 2",
        "> 4  push round 5: receive 3 tokens from rank 3",
        "  5  add what push round 5 brought",
        "  6  release the dkv of stage 2",
    ]
    assert describe_steps(Position("agreement 1")) == ""


def test_long_programs_are_shown_around_the_mark() -> None:
    config = FcpConfig(block_size=1, rounds_per_stage=1, blocks_per_message=1)
    steps = make_plan([80], cp_size=2, tokens_per_rank=40, config=config).rank_plan(1).backward
    assert len(steps) > MAX_LINES + 20
    for at in (0, len(steps) // 2, len(steps) - 1):
        lines = describe_steps(Position("backward", step=at, steps=steps)).splitlines()
        marked = [line for line in lines if line.startswith(">")]
        assert len(marked) == 1
        assert marked[0].startswith(f"> {at + 1} ")
        assert MAX_LINES < len(lines) <= MAX_LINES + 2
    assert lines[0] == f"  ... {len(steps) - MAX_LINES} steps before"
