"""The sub-commands of ``megatron-fcp``: one module each, imported only when it is called.

A module defines ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit status). It raises ValueError, naming
the flag, for what the user got wrong.
"""

from __future__ import annotations

COMMANDS = {
    "plan": "plan a packed stream, write the plan file, and print balance, traffic, rounds and memory",
    "simulate": "price a plan on a cluster model: efficiency, waiting, traffic, and whole training steps",
    "doctor": "check a launch config before anyone launches: how it divides the GPUs, memory of each, predicted step",
    "compare": "FCP against its peers over workloads, scales and clusters; one table, one picture",
    "tune": "find block size, layout and head groups for given lengths and hardware; write them as a config file",
    "view": "write one HTML page to look at a plan: who holds what, rounds, and what happens when",
    "trace": "write a trace file for Perfetto: planned passes, and a recorded run beside them",
    "replay": "run a plan's kernels, rank by rank, on one device; combine their times with a modelled network",
    "profile": "measure kernels and transfers of this machine; write them as a hardware file",
}
"""Name of each sub-command, which is the name of its module here, and what it does in one line."""
