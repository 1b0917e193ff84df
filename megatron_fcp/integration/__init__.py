"""ROOM 3: FCP inside megatron-core 0.16 to 0.20. The only room that imports Megatron, and none of it at import.

::

    register()  --> hooks --> SEAMS          every place where FCP enters, one table
    command line --> arguments, refusals --> Session(Settings)
    batch --> cu_seqlens --> Layout          on every rank: a pure function of the boundaries
          \\--> this rank's tokens            (batch.py), their positions (rotary.py)
    PackedSeqParams carries the Layout --> FcpCoreAttention --> runtime
    loss --> mean over the group's valid tokens
"""

from megatron_fcp.integration.hooks import is_registered, register, unregister

__all__ = ["is_registered", "register", "unregister"]
