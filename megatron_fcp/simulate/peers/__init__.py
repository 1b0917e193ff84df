"""Peers of FCP as programs for the same simulator; one module each, with its public source.

::

    Case --> te_ring | all_gather | usp | bytescale | dynamic_cp | wlb | magi | textbook | fcp --> Program --> Timeline

Peers whose pieces are finer than blocks (a ring's slivers) or that move KV by collectives are written as programs
directly; textbook FCP and this project's plans are :class:`megatron_fcp.plan.Plan` objects first. All of them pay the
same kernel and network prices, and none pays for bringing its documents into its layout.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers.all_gather import all_gather
from megatron_fcp.simulate.peers.bytescale import bytescale
from megatron_fcp.simulate.peers.dynamic_cp import dynamic_cp
from megatron_fcp.simulate.peers.fcp import fcp
from megatron_fcp.simulate.peers.magi import magi
from megatron_fcp.simulate.peers.te_ring import te_ring
from megatron_fcp.simulate.peers.textbook import textbook
from megatron_fcp.simulate.peers.ulysses import usp
from megatron_fcp.simulate.peers.wlb import wlb
from megatron_fcp.simulate.program import Program

System = Callable[..., Program]

SYSTEMS: dict[str, System] = {
    "fcp": fcp,
    "textbook-fcp": textbook,
    "magi": magi,
    "wlb-llm": wlb,
    "bytescale": bytescale,
    "dynamic-cp": dynamic_cp,
    "usp": usp,
    "all-gather": all_gather,
    "te-ring": te_ring,
}
RINGS = ("te-ring", "usp")

__all__ = ["RINGS", "SYSTEMS", "System", "check_systems", "run_system"]


def check_systems(names: list[str]) -> list[str]:
    """The names, if all are known.

    Raises
    ------
    ValueError
        Naming the first that is not.
    """
    for name in names:
        if name not in SYSTEMS:
            raise ValueError(f"--systems {name!r} is unknown; choose from {', '.join(SYSTEMS)}")
    return names


def run_system(name: str, case: Case, *, backward: bool = False) -> Program:
    """The program of system ``name`` for ``case``.

    Raises
    ------
    ValueError
        If the name is unknown, or the case has a window and the system is not this project's.
    """
    if case.window is not None and name != "fcp":
        raise ValueError(f"--systems {name}: only fcp is priced with a window, the others see whole documents")
    return SYSTEMS[check_systems([name])[0]](case, backward=backward)
