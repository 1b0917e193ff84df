"""Executable meaning of a plan, in numpy and fp64: what the runtime must compute, and a judge of plans.

:func:`execute` interprets the steps of every rank (Exchange, Compute, Reduce, Release) with one attention head, over a
transport on which a send blocks until it is received; :func:`dense_attention` is the masked attention of each whole
document. Buffers are NaN when they are allocated and when they are released, padding is NaN throughout, and what a rank
holds at any time is counted: a plan that reads what it does not have, drops what it still needs, or exceeds the memory
it promises does not pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_fcp.plan import Plan, RankPlan
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.program import LOCAL, Compute, Exchange, Peak, Reduce, Segment, Step, Transfer
from megatron_fcp.plan.work import StageWork
from megatron_fcp.testing.transport import Array, Network, Port, Views, Wait

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Inputs:
    """Queries, keys, values and the gradient of the output; each of shape [num_tokens, dim], NaN on padding."""

    q: Array
    k: Array
    v: Array
    dout: Array


@dataclass(frozen=True)
class Outputs:
    """Attention output and gradients, each of shape [num_tokens, dim], 0 on padding."""

    out: Array
    dq: Array
    dk: Array
    dv: Array


def random_inputs(table: BlockTable, rng: np.random.Generator, dim: int = 4) -> Inputs:
    """Standard normal inputs for the stream of ``table``."""
    padding = table.token_documents() < 0

    def draw() -> Array:
        values = rng.standard_normal((table.num_tokens, dim))
        values[padding] = np.nan
        return values

    return Inputs(draw(), draw(), draw(), draw())


@lru_cache(maxsize=64)
def _causal(length: int, window: int | None) -> Array:
    """What to add to the scores of ``length`` tokens: -inf above the diagonal, and below the window."""
    before = np.arange(length)[:, None] - np.arange(length)[None, :]
    hidden = (before < 0) if window is None else (before < 0) | (before > window)
    return np.where(hidden, -np.inf, 0.0)


def dense_attention(table: BlockTable, x: Inputs) -> Outputs:
    """Each document attended to in one piece, with the gradients of ``sum(out * dout)``."""
    result = Outputs(*(np.zeros_like(x.q) for _ in range(4)))
    for start, length in zip(table.document_start.tolist(), table.document_length.tolist()):
        here = slice(start, start + length)
        q, k, v, dout = x.q[here], x.k[here], x.v[here], x.dout[here]
        scores = q @ k.T / np.sqrt(q.shape[1])
        if table.mask == "causal":
            scores += _causal(length, table.window)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out = weights @ v
        dweights = dout @ v.T
        dscores = weights * (dweights - (dout * out).sum(axis=1, keepdims=True)) / np.sqrt(q.shape[1])
        result.out[here] = out
        result.dq[here] = dscores @ k
        result.dk[here] = dscores.T @ q
        result.dv[here] = weights.T @ dout
    return result


def execute(plan: Plan, x: Inputs, *, window: int | None = 1, rank_plans: Sequence[RankPlan] | None = None) -> Outputs:
    """Run forward and backward of ``plan`` on all ranks.

    Parameters
    ----------
    plan : Plan
    x : Inputs
    window : int or None
        Exchanges that a rank may have under way; None: any number, and transfers happen as late as they can.
    rank_plans : sequence of RankPlan, optional
        What the ranks execute; default: what ``plan`` tells them to.

    Raises
    ------
    Deadlock
        If the ranks end up waiting for each other.
    AssertionError
        If a rank uses a buffer before or after its time, or holds more than its plan says.
    """
    rank_plans = rank_plans or [plan.rank_plan(rank) for rank in range(plan.cp_size)]
    ranks = [_Rank(rank_plan, x) for rank_plan in rank_plans]
    for direction in ("forward", "backward"):
        network = Network(plan.cp_size, window)
        network.run([rank.run(direction == "backward", port) for rank, port in zip(ranks, network.ports)])
    result = Outputs(*(np.full_like(x.q, np.nan) for _ in range(4)))
    for rank in ranks:
        index = rank.plan.local_token_global_indices
        result.out[index], result.dq[index] = rank.out, rank.dq
        result.dk[index], result.dv[index] = rank.dkv[LOCAL][:, 0], rank.dkv[LOCAL][:, 1]
    return result


def largest_error(
    plan: Plan,
    rng: np.random.Generator,
    *,
    window: int | None = 1,
    rank_plans: Sequence[RankPlan] | None = None,
) -> float:
    """Largest difference between ``plan`` executed and dense attention over out, dq, dk and dv, on random inputs.

    Relative to the largest value of each, at least 1. NaN where a rank read what it must not.
    """
    x = random_inputs(plan.table, rng)
    got, want = execute(plan, x, window=window, rank_plans=rank_plans), dense_attention(plan.table, x)
    errors = [
        np.abs(a - b).max(initial=0.0) / max(1.0, np.abs(b).max(initial=0.0))
        for a, b in ((got.out, want.out), (got.dq, want.dq), (got.dk, want.dk), (got.dv, want.dv))
    ]
    padding = plan.table.token_documents() < 0
    assert not any(a[padding].any() for a in (got.out, got.dq, got.dk, got.dv)), "padding must stay exactly 0"
    return float(max(errors))


class _Rank:
    """One rank's memory, and the interpreter of its steps."""

    def __init__(self, plan: RankPlan, x: Inputs) -> None:
        self.plan = plan
        index = plan.local_token_global_indices
        self.q, self.dout = x.q[index], x.dout[index]
        self.kv: dict[int, Array] = {LOCAL: np.stack([x.k[index], x.v[index]], axis=1)}
        self.dkv: dict[int, Array] = {}
        self.staged: dict[int, list[tuple[Segment, Array]]] = {}  # push round -> what it brings, and where it belongs
        self.out, self.dq = np.zeros_like(self.q), np.zeros_like(self.q)
        self.lse = np.full(len(index), -np.inf)
        self.delta = np.zeros(len(index))
        self.scale = 1 / np.sqrt(self.q.shape[1])

    def run(self, backward: bool, port: Port) -> Generator[Wait, None, None]:
        """Interpret one pass; yields what it waits for."""
        steps = self.plan.backward if backward else self.plan.forward
        self.ready: dict[tuple[str, int], int] = {}  # buffer or push round -> exchanges that must be done before use
        self.closed: set[tuple[str, int]] = set()  # buffers whose time is over
        self.computed: set[tuple[int, int]] = set()  # (stage, part)
        if backward:
            self.dkv = {LOCAL: np.zeros_like(self.kv[LOCAL])}
            self.delta = (self.dout * self.out).sum(axis=1)
        self.held = {"kv": 0, "dkv": 0}  # tokens beside the rank's own, now
        self.most_held = dict(self.held)
        for step in steps:
            yield from self._step(step, backward, port)
        yield port.posted
        kept = ([*self.kv], [*self.dkv], [*self.staged])
        assert kept == ([LOCAL], [LOCAL] * backward, []), f"buffers were kept: KV, dKV and staged {kept}"
        stages = [s for s, work in enumerate(self.plan.stages) if s == LOCAL or work.kv_tokens]
        due = {(s, part) for s in stages for part in range(len(self.plan.parts[s]) if backward else 1)}
        assert self.computed == due, f"stages and parts {sorted(due - self.computed)} were left out"
        promised = self.plan.peak_backward if backward else self.plan.peak_forward
        most_held = Peak(self.most_held["kv"], self.most_held["dkv"])
        assert most_held == promised, f"rank {self.plan.rank} held {most_held}, but its plan promised {promised}"

    def _step(self, step: Step, backward: bool, port: Port) -> Generator[Wait, None, None]:
        if isinstance(step, Exchange):
            yield from self._exchange(step, port)
        elif isinstance(step, Compute):
            yield self.ready.get(("kv", step.stage), 0)
            assert (step.stage, step.part) not in self.computed, f"part {step.part} of stage {step.stage} runs twice"
            self.computed.add((step.stage, step.part))
            kv = self._open("kv", step.stage)
            if backward:
                for work in self.plan.parts[step.stage][step.part]:
                    self._attend_backward(work, kv, self._open("dkv", step.stage))
            else:
                for work in self.plan.calls[step.stage]:
                    self._attend_forward(work, kv)
        elif isinstance(step, Reduce):
            yield self.ready["staged", step.round]
            for segment, array in self.staged.pop(step.round):
                self._hold("dkv", -segment.tokens)
                assert segment.buffer in self.dkv, f"partials for buffer {segment.buffer}, which is not open"
                self.dkv[segment.buffer][segment.start : segment.stop] += array
        else:
            yield self.ready.get((step.kind, step.buffer), 0)
            buffer = (self.kv if step.kind == "kv" else self.dkv).pop(step.buffer)
            self._hold(step.kind, -len(buffer))
            buffer[...] = np.nan  # whoever still holds a view of it will notice
            self.closed.add((step.kind, step.buffer))

    def _exchange(self, step: Exchange, port: Port) -> Generator[Wait, None, None]:
        def pull_recv(transfer: Transfer) -> Views:
            computed = {stage for stage, _ in self.computed}
            assert not {s.buffer for s in transfer.segments} & computed, "arrives after its stage was computed"
            return tuple(self._open("kv", s.buffer)[s.start : s.stop] for s in transfer.segments)

        def push_recv(transfer: Transfer) -> Views:
            arrays = [np.full((s.tokens, *self.kv[LOCAL].shape[1:]), np.nan) for s in transfer.segments]
            self.staged.setdefault(step.round, []).extend(zip(transfer.segments, arrays))
            self._hold("dkv", transfer.tokens)
            return tuple(arrays)

        def send(transfer: Transfer) -> Views:
            buffers = self.kv if step.kind == "pull" else self.dkv
            return tuple(buffers[s.buffer][s.start : s.stop] for s in transfer.segments)

        done = yield from port.post(step, send, pull_recv if step.kind == "pull" else push_recv)
        kind = "kv" if step.kind == "pull" else "dkv"
        moved: Sequence[Transfer] = (*step.sends, *step.recvs) if step.kind == "pull" else step.sends
        for transfer in moved:
            self.ready.update({(kind, s.buffer): done for s in transfer.segments})
        self.ready["staged", step.round] = done if step.kind == "push" else 0

    def _open(self, kind: str, buffer: int) -> Array:
        """The buffer, allocated at its first use."""
        buffers = self.kv if kind == "kv" else self.dkv
        if buffer not in buffers:
            assert (kind, buffer) not in self.closed, f"{kind} buffer {buffer} is used after its release"
            fill = np.nan if kind == "kv" else 0.0
            shape = (self.plan.stages[buffer].kv_tokens, *self.kv[LOCAL].shape[1:])
            buffers[buffer] = np.full(shape, fill)
            self._hold(kind, shape[0])
        return buffers[buffer]

    def _hold(self, kind: str, tokens: int) -> None:
        self.held[kind] += tokens
        self.most_held[kind] = max(self.most_held[kind], self.held[kind])

    def _attend_forward(self, work: StageWork, kv: Array) -> None:
        for q, k, scores in self._items(work, kv):
            top = scores.max(axis=1)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1)
            with np.errstate(invalid="ignore"):  # NaN read by mistake is for the comparison to find
                lse = np.logaddexp(self.lse[q], top + np.log(total))
            self.out[q] = np.exp(self.lse[q] - lse)[:, None] * self.out[q] + np.exp(top - lse)[:, None] * (
                weights @ kv[k, 1]
            )
            self.lse[q] = lse

    def _attend_backward(self, work: StageWork, kv: Array, dkv: Array) -> None:
        for q, k, scores in self._items(work, kv):
            weights = np.exp(scores - self.lse[q][:, None])
            dscores = weights * (self.dout[q] @ kv[k, 1].T - self.delta[q][:, None]) * self.scale
            self.dq[q] += dscores @ kv[k, 0]
            dkv[k, 0] += dscores.T @ self.q[q]
            dkv[k, 1] += weights.T @ self.dout[q]

    def _items(self, work: StageWork, kv: Array) -> Generator[tuple[slice, slice, Array], None, None]:
        """(queries, keys, masked scores) of each entry of a stage's work list."""
        last = 0
        for q0, q1, k0, k1 in zip(*(a.tolist() for a in (work.q_start, work.q_stop, work.kv_start, work.kv_stop))):
            assert last <= q0 < q1, f"queries {q0}:{q1} are empty or come back after {last}"
            assert 0 <= k0 < k1 <= len(kv), f"keys {k0}:{k1} are empty or outside the {len(kv)} of the buffer"
            last = q1
            q, k = slice(q0, q1), slice(k0, k1)
            scores = self.q[q] @ kv[k, 0].T * self.scale
            if work.causal:
                assert q1 - q0 == k1 - k0, (q0, q1, k0, k1)
                scores += _causal(q1 - q0, work.window)
            elif work.anticausal:
                assert q1 - q0 <= k1 - k0, (q0, q1, k0, k1)
                scores[np.tri(q1 - q0, k1 - k0, -1, dtype=np.bool_)] = -np.inf
            yield q, k, scores
