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


def efficiencies(
    workload: str, ranks: int, hardware: str, systems: Sequence[str] = tuple(SYSTEMS), seed: int = 0
) -> dict[str, float]:
    lengths = draw_lengths(workload, num_tokens=ranks * TOKENS, seed=seed)
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
        assert ours >= best * 0.99, got
    if ranks == 256:  # the paper's speed-ups over systems that are not its own; 1.09 over its textbook version
        assert ours >= 1.13 * max(value for system, value in got.items() if system != "textbook-fcp"), got
        assert ours >= 1.05 * got["textbook-fcp"], got
        assert ours >= 2.21 * got["te-ring"], got


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize(("ranks", "seed"), [(16, 1), (16, 3), (16, 4), (16, 5), (16, 6), (32, 2), (32, 3), (32, 7)])
def test_level_with_those_that_need_not_keep_tokens_equal(ranks: int, seed: int, hardware: str) -> None:
    """Draws of bimodal without a long document, where dynamic CP cuts nothing, and with one of most of the stream."""
    got = efficiencies("bimodal", ranks, hardware, ("fcp", "dynamic-cp", "magi"), seed)
    ours = got.pop("fcp")
    assert ours >= max(got.values()) * 0.99, got


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("ranks", [16, 64, *(pytest.param(n, marks=pytest.mark.nightly) for n in (32, 128, 256))])
def test_level_with_rings_on_equal_documents(ranks: int, hardware: str) -> None:
    got = efficiencies("uniform-512k", ranks, hardware, ("fcp", *RINGS))
    ours = got.pop("fcp")
    assert ours >= max(got.values()) * 0.98, got
