"""What goes wrong between ranks. Every message names the ranks, what they were doing and for how long."""

from __future__ import annotations


class FcpError(RuntimeError):
    """A failure of FCP's traffic; the communicator that raised it cannot be used any more."""


class FcpTimeout(FcpError, TimeoutError):
    """A transfer took longer than the time-out, or a rank never came."""


class PeerLost(FcpError, ConnectionError):
    """The connection to a rank broke: it was killed, crashed, or gave up itself."""


class PlanMismatch(FcpError):
    """Ranks of one group were given different plans; raised on all of them."""
