"""Ring attention as in TransformerEngine (``--cp-comm-type p2p``): every document over every rank.

Source: NVIDIA/TransformerEngine ``context_parallel.py``, ``AttnFuncWithCPAndKVP2P``: documents padded to a multiple of
``2 * cp_size`` and cut per document; the whole KV of a rank travels round the whole ring whatever the mask needs;
transfers overlap the kernels of the step before.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers.ring import ring_pass
from megatron_fcp.simulate.program import Program


def te_ring(case: Case, *, backward: bool = False) -> Program:
    """One ring over all ranks."""
    out = case.builder()
    ring_pass(out, np.arange(case.cp_size), case.lengths, case, backward=backward)
    return out.build()
