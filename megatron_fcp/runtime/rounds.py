"""Rounds cut into group calls that torch.distributed and NCCL can take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_fcp.runtime.transport import Message

# A group call with tens of thousands of operations hangs (https://github.com/pytorch/pytorch/issues/174288). Both
# sides of a pair list the same messages, so counting per pair and direction cuts them at the same places.
MAX_OPS_PER_PEER = 64


def bounded(
    sends: Sequence[Message], recvs: Sequence[Message], limit: int | None = None
) -> list[tuple[list[Message], list[Message]]]:
    """Cut a round into group calls with at most ``limit`` operations per peer and direction.

    Parameters
    ----------
    sends, recvs : sequence of (peer, tensor)
    limit : int, optional
        Default :data:`MAX_OPS_PER_PEER`; the same on all ranks.

    Returns
    -------
    list of (sends, recvs)
        In the order in which they must be issued. Messages between two ranks are in calls of the same number on both.
    """
    limit = limit or MAX_OPS_PER_PEER
    calls: list[tuple[list[Message], list[Message]]] = []
    for side, messages in enumerate((sends, recvs)):
        seen: Counter[int] = Counter()
        for peer, tensor in messages:
            if tensor.numel() == 0:
                continue  # on both sides, which list the same sizes
            call = seen[peer] // limit
            seen[peer] += 1
            while len(calls) <= call:
                calls.append(([], []))
            calls[call][side].append((peer, tensor))
    return calls
