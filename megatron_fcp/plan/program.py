"""The order in which a rank posts transfers and runs kernels: a straight line of steps, nothing left to decide.

All ranks post their exchanges in one shared order (pull rounds, with each push round at its place between them), so
that even a transport in which a send blocks until it is received cannot deadlock. Where owners send all that they
have, two stages of KV are held: a rank posts the pulls of stage ``s`` only once it has attended to stage ``s - 2``. In
waves it waits for what makes room (:mod:`plan.held`), and pushes go between the pulls of waves
(:mod:`plan.push_waves`).

::

    forward    pull 1 | pull 2 | attend local, 1 | pull 3 | attend 2 | pull 4 | attend 3 ...
    backward   pull 1 | pull 2 | attend half of local, 1 | push 1 | pull 3 | attend 2 | push 2 ... | rest of local

Where blocks are passed on, backward attends to each stage in parts, and all pushes follow the last pull::

    backward   pulls | half of local | 1, part 0 | part 1 | push | part 2 | push | ... | more of local | push | ...
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kv", "dkv"]
_KINDS: tuple[Kind, ...] = ("dkv", "kv")  # in the order in which buffers are released
LOCAL = 0  # buffer 0 holds the rank's own tokens; buffer s >= 1 what stage s received


@dataclass(frozen=True)
class Segment:
    """Tokens ``start:stop`` of a buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Transfer:
    """What goes to, or comes from, a peer in a round; both sides list the same segment lengths in the same order."""

    peer: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Length of all segments in tokens."""
        return sum(s.tokens for s in self.segments)


@dataclass(frozen=True)
class Exchange:
    """One round as one rank sees it: at most one send and one receive per tier.

    ``kind`` "pull" moves KV, "push" moves partial dKV; a push receive lands in a staging buffer until its Reduce.
    """

    kind: Literal["pull", "push"]
    round: int
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]


@dataclass(frozen=True)
class Compute:
    """Run the kernels of a stage, or of a part of it, once all that its buffer awaits has arrived."""

    stage: int
    part: int = 0


@dataclass(frozen=True)
class Reduce:
    """Add what push round ``round`` brought to the buffers its segments name."""

    round: int


@dataclass(frozen=True)
class Release:
    """Drop a stage's KV or dKV buffer, once the sends from it are through."""

    kind: Kind
    buffer: int


Step = Exchange | Compute | Reduce | Release


@dataclass(frozen=True)
class Slot:
    """An exchange with its place in the order that all ranks share."""

    exchange: Exchange
    stage: int  # pull: the stage that what arrives belongs to
    calls: int | None = None  # push: calls made before; None: all of the stages that it touches


def pass_steps(
    slots: list[Slot], calls: list[Compute], stage_tokens: list[int], attended: list[int]
) -> tuple[Step, ...]:
    """Steps of a forward (pulls only) or backward (pulls and pushes) pass of one rank.

    Parameters
    ----------
    slots : list of Slot
        The rank's exchanges in shared order.
    calls : list of Compute
        In order; those on remote stages that receive nothing take no step.
    stage_tokens : list of int
        KV tokens of each stage, the local one first.
    attended : list of int
        Stage up to which the rank has attended when it begins to pull each stage (see :mod:`plan.held`).
    """
    steps: list[Step] = []
    done = 0
    pushes: list[Exchange] = []
    through = [0] * len(stage_tokens)  # calls up to the last one of each stage, but for the rest of the local one
    opened = [0] * len(stage_tokens)  # calls up to the first one
    for i, call in enumerate(calls, 1):
        if call.stage != LOCAL or call.part == 0:
            through[call.stage] = i
            opened[call.stage] = opened[call.stage] or i

    def attend(count: int) -> None:
        nonlocal done
        while done < count:
            if calls[done].stage == LOCAL or stage_tokens[calls[done].stage]:
                steps.append(calls[done])
            done += 1

    def reduce_down_to(kept: int) -> None:
        while len(pushes) > kept:
            steps.append(Reduce(pushes.pop(0).round))

    for slot in slots:
        exchange = slot.exchange
        if exchange.kind == "pull":
            if exchange.recvs and attended[slot.stage] > LOCAL:
                attend(through[attended[slot.stage]])
        else:
            touched = {s.buffer for t in (*exchange.sends, *exchange.recvs) for s in t.segments}
            if slot.calls is None:
                attend(max(through[buffer] for buffer in touched))
            else:
                attend(max(slot.calls, *(opened[buffer] for buffer in touched)))
            late = [i for i, push in enumerate(pushes) if _passes_on(exchange, push)]
            reduce_down_to(min(len(pushes) - 1 - max(late, default=-1), 1))
            if exchange.recvs:
                pushes.append(exchange)
        steps.append(exchange)
    attend(len(calls))
    reduce_down_to(0)
    return tuple(_with_releases(steps, attended))


def _passes_on(exchange: Exchange, push: Exchange) -> bool:
    """Whether ``exchange`` sends partials to which those that ``push`` receives must have been added."""
    sent = [s for t in exchange.sends for s in t.segments]
    received = [s for t in push.recvs for s in t.segments]
    return any(s.buffer == r.buffer and s.start < r.stop and r.start < s.stop for r in received for s in sent)


def _with_releases(steps: list[Step], attended: list[int]) -> list[Step]:
    """Insert releases as late as they must make room, so that nothing waits for a send that it need not wait for."""
    last: dict[tuple[Kind, int], int] = {}
    first: dict[tuple[Kind, int], int] = {}
    pushes = {step.round: step for step in steps if isinstance(step, Exchange) and step.kind == "push"}
    for i, step in enumerate(steps):
        for key in _touched(step, pushes):
            last[key] = i
            first.setdefault(key, i)
    at: dict[int, list[Release]] = {}
    stages = max((buffer for _, buffer in last), default=LOCAL)
    for kind in _KINDS:
        opens = [len(steps)] * (len(attended) + 1)  # first use of this or any later buffer
        for buffer in range(stages, LOCAL, -1):
            opens[buffer] = min(opens[buffer + 1], first.get((kind, buffer), len(steps)))
        for buffer in range(LOCAL + 1, stages + 1):
            if (kind, buffer) in last:
                opened = opens[bisect_left(attended, buffer)]  # by the first stage that needs the room
                at.setdefault(max(last[kind, buffer] + 1, opened), []).append(Release(kind, buffer))
    out: list[Step] = []
    for i in range(len(steps) + 1):
        out.extend(at.get(i, []))
        out.extend(steps[i : i + 1])
    return out


def _touched(step: Step, pushes: dict[int, Exchange]) -> set[tuple[Kind, int]]:
    if isinstance(step, Compute):
        kinds: tuple[Kind, ...] = ("kv", "dkv") if pushes else ("kv",)
        return {(kind, step.stage) for kind in kinds if step.stage != LOCAL}
    if isinstance(step, Reduce):
        transfers, kind = pushes[step.round].recvs, "dkv"
    elif isinstance(step, Exchange):
        transfers = (*step.sends, *step.recvs) if step.kind == "pull" else step.sends
        kind = "kv" if step.kind == "pull" else "dkv"
    else:
        return set()
    return {(kind, s.buffer) for t in transfers for s in t.segments if s.buffer != LOCAL}


@dataclass(frozen=True)
class Peak:
    """Most tokens that a pass holds at once beside the rank's own: pulled KV, and partial dKV with its staging."""

    kv_tokens: int
    dkv_tokens: int


def peak_memory(steps: tuple[Step, ...], buffer_tokens: list[int]) -> Peak:
    """Largest KV and dKV token counts held at once over a pass (each on its own)."""
    held: set[tuple[str, int]] = set()
    staged: dict[int, int] = {}
    now = {"kv": 0, "dkv": 0}
    most = dict(now)

    def hold(kind: str, buffer: int) -> None:
        if buffer != LOCAL and (kind, buffer) not in held:
            held.add((kind, buffer))
            now[kind] += buffer_tokens[buffer]

    backward = any(isinstance(s, Exchange) and s.kind == "push" for s in steps)
    for step in steps:
        if isinstance(step, Exchange):
            for transfer in step.recvs:
                if step.kind == "push":
                    staged[step.round] = staged.get(step.round, 0) + transfer.tokens
                    now["dkv"] += transfer.tokens
                else:
                    hold("kv", transfer.segments[0].buffer)  # a round arrives in one stage
        elif isinstance(step, Reduce):
            now["dkv"] -= staged.pop(step.round)
        elif isinstance(step, Compute):
            if backward:
                hold("dkv", step.stage)
        elif (step.kind, step.buffer) in held:
            held.remove((step.kind, step.buffer))
            now[step.kind] -= buffer_tokens[step.buffer]
        for kind in most:
            most[kind] = max(most[kind], now[kind])
    return Peak(most["kv"], most["dkv"])
