"""ROOM 2: executes a RankPlan with torch; takes no decision and knows nothing of Megatron.

::

    RankPlan --> CompiledPlan --> fcp_attention --+-- buffers   KV in, dKV out, by the plan's steps
                                                  |-- kernels   ranges of Q and KV -> (out, lse), gradients
                                                  |-- merge     partial outputs -> whole
                                                  '-- transport Communicator: rounds over torch.distributed
    Route --> CompiledRoute --> reshuffle             tokens between Megatron's layout and the plan's
    both --> reshuffled_attention                     tokens move while other heads are attended to
"""

from megatron_fcp.runtime.attention import fcp_attention
from megatron_fcp.runtime.communicator import Communicator
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.errors import FcpError, FcpTimeout, PeerLost, PlanMismatch
from megatron_fcp.runtime.kernels import Kernel, select_kernel
from megatron_fcp.runtime.reshuffle import CompiledRoute, reshuffle
from megatron_fcp.runtime.reshuffled import reshuffled_attention

__all__ = [
    "Communicator",
    "CompiledPlan",
    "CompiledRoute",
    "FcpError",
    "FcpTimeout",
    "Kernel",
    "PeerLost",
    "PlanMismatch",
    "fcp_attention",
    "reshuffle",
    "reshuffled_attention",
    "select_kernel",
]
