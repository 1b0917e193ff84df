"""Jobs of real processes over gloo, for tests of the runtime: torch and the runtime, no Megatron.

The ranks are forked from a warm server (:mod:`megatron_fcp.testing.pool`), join one process group through a store that
the driver hosts, and call a function with their :class:`Communicator`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan
from megatron_fcp.runtime.communicator import Communicator
from megatron_fcp.testing.pool import WorkerPool, resolve


@dataclass(frozen=True)
class _Call:
    """One rank's part of a job."""

    function: str
    args: tuple[Any, ...]
    rank: int
    size: int
    port: int
    timeout_s: float


class GlooPool:
    """Runs functions on gloo ranks; a context manager.

    ::

        with GlooPool() as pool:
            values = pool.run(4, some_test, 0.5)     # some_test(comm, 0.5) on 4 ranks
    """

    def __init__(self) -> None:
        self._pool = WorkerPool("megatron_fcp.testing.gloo_pool:preload")

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; no process is left."""
        self._pool.close()

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        fcp_timeout_s: float = 30.0,
        grace: float = 2.0,
    ) -> list[Any]:
        """Call ``function(comm, *args)`` on ``size`` ranks; results in rank order.

        Parameters
        ----------
        size : int
        function : callable
            Importable by module and name.
        *args
            Picklable, as the result must be.
        timeout : float, optional
            Seconds for the job.
        fcp_timeout_s : float, optional
            Time-out of the ranks' communicator.
        grace : float, optional
            Seconds that the other ranks get after the first failure.

        Raises
        ------
        JobError
            When a rank raised, died or stalled; shows every rank's traceback and its place in the program.
        """
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        name = f"{function.__module__}:{function.__qualname__}"
        calls = [_Call(name, args, rank, size, store.port, fcp_timeout_s) for rank in range(size)]
        outcomes = self._pool.run("megatron_fcp.testing.gloo_pool:work", calls, timeout=timeout, grace=grace)
        return [pickle.loads(outcome.value) for outcome in outcomes]


def load_planner() -> Plan:
    """Make a plan of every kind that the tests' ranks make, so that forked ranks find the planner compiled."""
    from megatron_fcp.plan import make_plan, with_window
    from megatron_fcp.runtime import CompiledPlan

    config = FcpConfig(block_size=4)
    plan = make_plan([21, 3, 8], cp_size=2, tokens_per_rank=16, config=config)
    for one in (plan, with_window(plan, 5, config)):
        CompiledPlan(one.rank_plan(0))
    return plan


def preload() -> None:
    """Import what every job needs, and load the planner's compiled functions, before the server forks."""
    from megatron_fcp.testing import attention_check

    torch.use_deterministic_algorithms(True)  # also: uninitialised memory is NaN in every job
    attention_check.random_inputs(load_planner(), attention_check.Model(), 0)


def work(call: _Call) -> bytes:
    """One rank: join the group, run the function, leave."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", call.port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.size, timeout=timedelta(seconds=120))
    comm = Communicator.create(range(call.size), call.timeout_s, "test")
    try:
        value = resolve(call.function)(comm, *call.args)
    except BaseException:
        print(f"rank {call.rank} was in: {comm.position}", flush=True)
        raise
    dist.barrier()
    comm.close()
    return pickle.dumps(value)  # by value: the pipe's own pickler would share tensors through file descriptors
