"""FCP's traffic over one process group of torch.distributed: gloo on CPUs, NCCL on GPUs.

The NCCL path has the same steps as the gloo path; it has not been run on GPUs yet. There NCCL's own stream carries out
the rounds in the order in which they are posted, each once the compute stream has done what it was given before that:
buffers come from the caching allocator, and earlier kernels may still use their memory. Only what needs a round waits
for it, and no sooner: with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for, all streams share one queue to
the GPU, and a wait holds up whatever is issued behind it.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_fcp.runtime.dump import describe_steps
from megatron_fcp.runtime.errors import FcpError, FcpTimeout, PeerLost, PlanMismatch
from megatron_fcp.runtime.groups import make_groups
from megatron_fcp.runtime.rounds import bounded
from megatron_fcp.runtime.transport import Message, Pending, Position
from megatron_fcp.runtime.watch import Board, RankState, Watch, explain, name_ranks

SETUP_TIMEOUT_S = 600.0  # processes may reach the creation of the group minutes apart
SAME_BATCHES = "feed every rank of a context-parallel group the same batches in the same order"
REPORT_S = 60.0  # from a time-out to the end of all ranks, at most: nobody else's time-out should come in between
_incarnations: Counter[str] = Counter()


@dataclass(frozen=True)
class _Wait:
    """What the main thread waits for, since when."""

    peers: tuple[int, ...]
    text: str
    since: float


class Communicator:
    """One context-parallel group's transfers, with time-outs that name the cause.

    Parameters
    ----------
    group : ProcessGroup
        Used by FCP alone; this rank is a member.
    timeout_s : float
        Seconds a transfer may take before all ranks of the group stop with a report.
    name : str
        Appears in reports.
    device : torch.device or str
        Where the tensors live.
    control : ProcessGroup, optional
        For small host messages; needed where ``group`` cannot carry CPU tensors.
    store : Store, optional
        Key-value store of the job; default: that of the default group.

    Attributes
    ----------
    rank, size : int
        In the group.
    in_order : bool
        The device carries out the rounds, one after the other, and the host waits for none.
    position : Position
        Where this rank is in its program.
    note : str
        Set by the caller to what a report should tell, such as the batch or the file that holds the plan.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        name: str = "fcp",
        *,
        device: torch.device | str = "cpu",
        control: dist.ProcessGroup | None = None,
        store: Store | None = None,
    ) -> None:
        self.group, self.timeout_s, self.name = group, timeout_s, name
        self.control = control or group
        self.device = torch.device(device)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.global_ranks: list[int] = dist.get_process_group_ranks(group)
        self.position = Position()
        self.note = ""
        self._waiting: _Wait | None = None
        self._moved = time.monotonic()  # when this rank last left a transfer
        self._failure: FcpError | None = None
        self._agreements = 0
        self.in_order = self.device.type == "cuda"
        self._in_flight: deque[tuple[dist.Work, float, str]] = deque()
        key = f"fcp/{name}/{'-'.join(map(str, self.global_ranks))}"
        _incarnations[key] += 1
        self._board = Board(_own_store(store, f"{key}/{_incarnations[key]}"), self.rank, self.size)
        interval = min(max(timeout_s / 10, 0.1), 5.0)
        self._grace = 3 * interval + 0.5
        me = weakref.ref(self)
        self._watch = Watch(
            self._board,
            lambda: _state_of(me()),
            lambda: _overdue_of(me()),
            interval_s=interval,
            grace_s=self._grace + 2 * interval,
            name=self._title,
            global_ranks=self.global_ranks,
        )
        weakref.finalize(self, self._watch.stop)

    @staticmethod
    def create(
        ranks: Sequence[int],
        timeout_s: float,
        name: str = "fcp",
        *,
        device: torch.device | str = "cpu",
        max_ctas: int | None = None,
    ) -> Communicator:
        """Make the process group (or two, where NCCL needs gloo beside it) and its communicator.

        Called by the members only. On GPUs it returns once every pair is connected: NCCL sets a group up in its first
        transfer, in which all members must take part, while a plan's first round may leave some out.

        Parameters
        ----------
        ranks : sequence of int
            Global ranks, ascending: torch.distributed numbers the members of a group in this order.
        timeout_s, name, device
            As for the class.
        max_ctas : int, optional
            SMs that one of NCCL's kernels may take; see :func:`megatron_fcp.runtime.groups.nccl_options`.

        Raises
        ------
        ValueError
            If the ranks do not ascend.
        """
        setup_s = max(SETUP_TIMEOUT_S, timeout_s + REPORT_S)  # NCCL ends a process at its group's without a report
        group, control = make_groups(ranks, setup_s, name, torch.device(device), max_ctas)
        comm = Communicator(group, timeout_s, name, device=device, control=control)
        if control is not group:
            comm.warm_up()
        return comm

    @property
    def _title(self) -> str:
        return f"{self.name!r} (global ranks {', '.join(map(str, self.global_ranks))})"

    def close(self) -> None:
        """Stop watching; the process group stays the caller's."""
        self._watch.stop()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start one round: all sends and receives of it, in group calls of a bounded number of operations.

        Parameters
        ----------
        sends, recvs : sequence of (peer, tensor)
            Peers are ranks in the group; tensors are contiguous. What a pair sends each other, both sides list in the
            same order with the same sizes.
        """
        self._check_usable()
        where = str(self.position)
        pending = _Round(self, where)
        for some_sends, some_recvs in bounded(sends, recvs):
            ops = [dist.P2POp(dist.isend, t, self.global_ranks[peer], self.group) for peer, t in some_sends]
            ops += [dist.P2POp(dist.irecv, t, self.global_ranks[peer], self.group) for peer, t in some_recvs]
            peers = [peer for peer, _ in (*some_sends, *some_recvs)]
            try:
                works = dist.batch_isend_irecv(ops)
            except RuntimeError as error:
                raise self._fail(
                    peers, f"start a transfer with {name_ranks(sorted(set(peers)))}", 0.0, error
                ) from error
            if self.in_order:  # one work for all of them
                pending.issued += works
                pending.tensors += [op.tensor for op in ops]  # alive until the compute stream waits for the works
                self._in_flight.extend((work, time.monotonic(), where) for work in works)
            else:
                assert len(works) == len(ops)
                pending.sends += zip(works, peers[: len(some_sends)])
                pending.recvs += zip(works[len(some_sends) :], peers[len(some_sends) :])
        return pending

    def warm_up(self) -> None:
        """Touch every pair once: connections are made on first use, which takes long on GPUs
        (https://github.com/NVIDIA/nccl/issues/2130). All ranks call it."""
        self.position.enter("warm-up of the pairs", "", self.size - 1)
        token = torch.zeros(1, device=self.device)
        for shift in range(1, self.size):
            self.position.step = shift - 1
            got = torch.empty_like(token)
            self.post([((self.rank + shift) % self.size, token)], [((self.rank - shift) % self.size, got)]).wait()

    def agree(self, digest: str, what: str = "plan", remedy: str = SAME_BATCHES) -> None:
        """Compare a digest over the ranks; call it before the first transfer of a batch.

        Parameters
        ----------
        digest : str
        what : str
            What the digest is of, told in errors: such as "the plan of batch 12".
        remedy : str
            What to do where it differs, told there as well.

        Raises
        ------
        PlanMismatch
            On every rank, naming those that differ.
        FcpTimeout, PeerLost
            If a rank does not come; names it.
        """
        self._check_usable()
        if self.size == 1:
            return
        self._agreements += 1
        self.position.enter(f"agreement {self._agreements} on {what}", digest, 0)
        mine = torch.frombuffer(bytearray(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8)
        mine = torch.cat([mine, torch.tensor([self._agreements]).view(torch.uint8)])
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        others = tuple(r for r in range(self.size) if r != self.rank)
        text = f"compare plans with {name_ranks(others)}"
        try:
            work = dist.all_gather(everyone, mine, group=self.control, async_op=True)
        except RuntimeError as error:
            raise self._fail(others, text, 0.0, error) from error
        assert work is not None
        self._wait(work, others, text, self.timeout_s)
        if any(not torch.equal(other, mine) for other in everyone):
            raise self._mismatch([bytes(e.tolist()) for e in everyone], digest, what, remedy)

    def _mismatch(self, everyone: list[bytes], digest: str, what: str, remedy: str) -> PlanMismatch:
        """All ranks are here, so each can tell the others what it was given."""
        groups: dict[bytes, list[int]] = {}
        for rank, value in enumerate(everyone):
            groups.setdefault(value, []).append(rank)
        common = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        differ = [r for r in range(self.size) if r not in common]
        note = f"{what}, digest {digest[:16]}, agreement {self._agreements}" + (f"; {self.note}" if self.note else "")
        self._board.post(RankState(self.rank, "busy", note))
        states = self._board.collect(self._grace)
        lines = [f"  rank {r} has {s.position}" for r, s in sorted(states.items())]
        lines += [f"  rank {r} has not told" for r in range(self.size) if r not in states]
        error = PlanMismatch(
            f"FCP group {self._title}: the ranks were given different input for {what}: {name_ranks(differ)} "
            f"{'differs' if len(differ) == 1 else 'differ'} from {name_ranks(common)}; {remedy}\n" + "\n".join(lines)
        )
        self._stop_using(error)
        return error

    # waiting and failing

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"this communicator failed before: {self._failure}")

    def _wait(self, work: dist.Work, peers: tuple[int, ...], text: str, seconds: float) -> None:
        self._check_usable()
        start = time.monotonic()
        self._waiting = _Wait(peers, text, start)
        try:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise self._fail(peers, text, time.monotonic() - start, error) from error
        finally:
            self._waiting = None
            self._moved = time.monotonic()

    def _fail(self, peers: Sequence[int], text: str, waited: float, error: Exception) -> FcpError:
        """Tell the others, ask where they are, and put the cause into words."""
        late = _is_timeout(error)
        lost = sorted(set(peers)) if not late else []
        waits_for = sorted(set(peers))
        state = RankState(self.rank, "waits", str(self.position), waits_for, text, waited, lost, self.note)
        self._board.post(state)
        self._board.raise_alarm()
        self._abort()
        states = self._board.collect(self._grace)
        states[self.rank] = state
        cause = explain(states, self.global_ranks) if len(states) > 1 or self._board.reachable else self._alone(state)
        what = f"took longer than {self.timeout_s:g} s" if late else "broke off"
        report = (
            f"FCP group {self._title}: on rank {self.rank}, to {text} in {self.position} {what}\n{cause}\n({error})"
        )
        steps = describe_steps(self.position)
        if steps:
            report += f"\nplan {self.position.digest}, {self.position.task}, as rank {self.rank} executes it:\n{steps}"
        failure: FcpError = FcpTimeout(report) if late else PeerLost(report)
        self._stop_using(failure)
        return failure

    def _abort(self) -> None:
        """Close the connections: whoever waits for this rank learns it now."""
        for group in {id(g): g for g in (self.group, self.control)}.values():
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _alone(self, state: RankState) -> str:
        return (
            f"cause: {name_ranks(state.waits_for)} or the job's store (usually on global rank 0), which cannot be "
            f"reached either\n  rank {self.rank} {state}"
        )

    def _stop_using(self, failure: FcpError) -> None:
        self._failure = failure
        self._watch.stop()


class _Round:
    """A posted round; see :class:`megatron_fcp.runtime.transport.Pending`."""

    def __init__(self, comm: Communicator, where: str) -> None:
        self.comm, self.where = comm, where
        self.sends: list[tuple[dist.Work, int]] = []
        self.recvs: list[tuple[dist.Work, int]] = []
        self.issued: list[dist.Work] = []
        self.tensors: list[torch.Tensor] = []

    def wait_recvs(self) -> None:
        self._wait_issued()
        self._drain(self.recvs, "receive from")

    def wait(self) -> None:
        self.wait_recvs()
        self._drain(self.sends, "send to")

    def _drain(self, works: list[tuple[dist.Work, int]], verb: str) -> None:
        deadline = time.monotonic() + self.comm.timeout_s
        for work, peer in works:
            text = f"{verb} rank {peer} (posted in {self.where})"
            self.comm._wait(work, (peer,), text, deadline - time.monotonic())
        works.clear()  # and with them the tensors

    def _wait_issued(self) -> None:
        for work in self.issued:
            work.wait()  # makes the current stream wait; with a time-out it would be the host
        self.issued.clear()
        self.tensors.clear()


def _is_timeout(error: Exception) -> bool:
    """Gloo tells time-outs from broken connections only by their text."""
    return "imed out" in str(error) or "imeout" in str(error)


def _own_store(store: Store | None, prefix: str) -> Store:
    """A connection of our own to the job's store, so that blocking calls of others do not block the watch."""
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is not None:
        store = clone()
    return PrefixStore(prefix, store)


def _state_of(comm: Communicator | None) -> RankState | None:
    if comm is None:
        return None
    wait, now = comm._waiting, time.monotonic()
    if wait is None:
        return RankState(comm.rank, "busy", str(comm.position), seconds=now - comm._moved, note=comm.note)
    return RankState(
        comm.rank, "waits", str(comm.position), sorted(set(wait.peers)), wait.text, now - wait.since, [], comm.note
    )


def _overdue_of(comm: Communicator | None) -> str | None:
    """On a GPU nobody waits on the host: look at the rounds on the way."""
    if comm is None or not comm._in_flight:
        return None
    flights = comm._in_flight
    with torch.cuda.device(comm.device):  # this thread's own device is 0, where a question would begin a context
        while flights and flights[0][0].is_completed():
            flights.popleft()
    if flights and time.monotonic() - flights[0][1] > comm.timeout_s:
        return f"on rank {comm.rank}, {flights[0][2]} took longer than {comm.timeout_s:g} s"
    return None
