"""FCP against its peers: ahead where documents differ, level where they do not. Figures in docs/simulator.md."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers import RINGS, SYSTEMS, run_system

pytestmark = pytest.mark.plan

TOKENS = 32768
LONG = ("longtail", "weaktail", "bimodal")
# A known miss, as a share of the peer's efficiency: at 16 ranks no document of this bimodal draw needs more than one
# rank, and dynamic CP need not keep token counts equal.
BEHIND = {("bimodal", 16): 0.04}


def efficiencies(workload: str, ranks: int, hardware: str, systems: Sequence[str] = tuple(SYSTEMS)) -> dict[str, float]:
    lengths = draw_lengths(workload, num_tokens=ranks * TOKENS, seed=0)
    case = Case(lengths, ranks, TOKENS, load_hardware(hardware))
    return {system: case.efficiency(run_system(system, case)) for system in systems}


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("workload", LONG)
@pytest.mark.parametrize("ranks", [16, 32, 64, *(pytest.param(n, marks=pytest.mark.nightly) for n in (128, 256))])
def test_ahead_of_every_peer(workload: str, ranks: int, hardware: str) -> None:
    """The nightly cells took 10 s each at 128 and 20 s at 256 ranks, on a machine with other work."""
    got = efficiencies(workload, ranks, hardware)
    ours = got.pop("fcp")
    best = max(got.values())
    if ranks >= 64:
        assert ours > best, got
    else:
        assert ours >= best * (1 - BEHIND.get((workload, ranks), 0.01)), got
    if ranks == 256:  # the paper's speed-ups over systems that are not its own; 1.09 over its textbook version
        assert ours >= 1.13 * max(value for system, value in got.items() if system != "textbook-fcp"), got
        assert ours >= 1.05 * got["textbook-fcp"], got
        assert ours >= 2.21 * got["te-ring"], got


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("ranks", [16, 64, *(pytest.param(n, marks=pytest.mark.nightly) for n in (32, 128, 256))])
def test_level_with_rings_on_equal_documents(ranks: int, hardware: str) -> None:
    got = efficiencies("uniform-512k", ranks, hardware, ("fcp", *RINGS))
    ours = got.pop("fcp")
    assert ours >= max(got.values()) * 0.98, got
