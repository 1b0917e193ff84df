"""A transport for several ranks on one GPU: tensors travel through host memory, by any transport of CPU tensors.

NCCL refuses two ranks on one device. Here every send is copied to the host before it is posted, and every receive to
the device once it has come; both wait for the device, which a test can afford.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fcp.runtime.transport import Message, Pending, Transport


class HostStagedTransport:
    """Wraps a transport of CPU tensors; itself a :class:`megatron_fcp.runtime.transport.Transport` of any device's."""

    in_order = False

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.position = inner.rank, inner.size, inner.position

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> _StagedRound:
        """Start a round."""
        outgoing = [(peer, tensor.detach().to("cpu", copy=True)) for peer, tensor in sends]
        incoming = [(peer, torch.empty(tensor.shape, dtype=tensor.dtype)) for peer, tensor in recvs]
        targets = [(tensor, staged) for (_, tensor), (_, staged) in zip(recvs, incoming)]
        return _StagedRound(self.inner.post(outgoing, incoming), targets)


class _StagedRound:
    def __init__(self, pending: Pending, targets: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pending, self._targets = pending, targets

    def wait_recvs(self) -> None:
        self._pending.wait_recvs()
        for tensor, staged in self._targets:
            tensor.copy_(staged)
        self._targets = []

    def wait(self) -> None:
        self.wait_recvs()
        self._pending.wait()
