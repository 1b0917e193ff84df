"""Tokens arrive where the destination layout wants them, and gradients find their way back."""

import numpy as np
import pytest
import torch

from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.route import Route, make_route
from megatron_fcp.runtime import Communicator, CompiledRoute, reshuffle
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime


def random_route(rng: np.random.Generator, cp_size: int) -> Route:
    """Two random layouts of the same tokens, uneven over the ranks; half of the routes skip some tokens."""
    total = int(rng.integers(0, 40))

    def layout() -> list[np.ndarray]:
        cuts = np.sort(rng.integers(0, total + 1, size=cp_size - 1))
        return np.split(rng.permutation(total), cuts)

    skipped = frozen(np.flatnonzero(rng.random(total) < 0.2)) if rng.random() < 0.5 else None
    return make_route([frozen(i) for i in layout()], [frozen(i) for i in layout()], skipped=skipped)


def check(comm: Transport, route: Route) -> None:
    total = sum(i.size for i in route.source_index)
    g = torch.Generator().manual_seed(total)
    x = torch.randn(total, 2, 3, generator=g, dtype=torch.float64)
    y = torch.randn(total, generator=g).to(torch.bfloat16)
    moved = torch.ones(total, dtype=torch.bool)
    moved[torch.from_numpy(route.skipped.copy())] = False
    source = torch.from_numpy(route.source_index[comm.rank].copy())
    destination = torch.from_numpy(route.destination_index[comm.rank].copy())
    compiled = CompiledRoute(route.rank_route(comm.rank))
    a = x[source].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # strided
    b = y[source].requires_grad_()
    got_a, got_b = reshuffle((a, b), compiled, comm)
    assert torch.equal(got_a, x[destination] * moved[destination][:, None, None])
    assert torch.equal(got_b, y[destination] * moved[destination])
    weight = torch.randn(total, 2, 3, generator=g, dtype=torch.float64)
    (got_a * weight[destination]).sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, weight[source] * moved[source][:, None, None])
    (back,) = reshuffle((got_a.detach(),), compiled.reverse(), comm)
    assert torch.equal(back, x[source] * moved[source][:, None, None])
    assert compiled.reverse().reverse() is compiled


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_random_layouts(cp_size: int) -> None:
    for seed in range(25):
        route = random_route(np.random.default_rng([31, cp_size, seed]), cp_size)
        run_ranks(cp_size, lambda comm, r=route: check(comm, r), mode="rendezvous")


def check_many(comm: Communicator) -> None:
    for seed in range(10):
        check(comm, random_route(np.random.default_rng([32, seed]), comm.size))


@pytest.mark.parametrize("cp_size", [2, 5])
def test_random_layouts_over_gloo(gloo: GlooPool, cp_size: int) -> None:
    gloo.run(cp_size, check_many)


def test_nothing_moves_without_a_group() -> None:
    route = make_route([frozen([1, 0, 2])], [frozen([0, 1, 2])])
    (out,) = reshuffle((torch.tensor([10.0, 20.0, 30.0]),), CompiledRoute(route.rank_route(0)), None)
    assert out.tolist() == [20.0, 10.0, 30.0]


def test_shapes_and_ranks_are_checked() -> None:
    route = CompiledRoute(make_route([frozen([0]), frozen([1])], [frozen([1]), frozen([0])]).rank_route(1))
    with pytest.raises(ValueError, match=r"the route takes 1 tokens; got a tensor of shape \(3,\)"):
        reshuffle((torch.zeros(3),), route, None)
    with pytest.raises(ValueError, match="the route is that of rank 1 of 2, but the communicator is rank 0 of 1"):
        reshuffle((torch.zeros(1),), route, None)
