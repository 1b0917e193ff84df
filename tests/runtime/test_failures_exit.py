"""Whole programs: when one rank fails, the processes of the others are gone in time, with an exit code that tells."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.runtime

SIZE, CULPRIT, FCP_TIMEOUT_S, LIMIT_S = 3, 1, 5.0, 10.0

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed import TCPStore
from megatron_fcp.plan import make_plan
from megatron_fcp.runtime import Communicator
from megatron_fcp.testing.attention_check import Model, random_inputs, run_rank

rank, size, culprit, port, what = *map(int, sys.argv[1:5]), sys.argv[5]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port), rank=rank, world_size=size)
comm = Communicator.create(range(size), {timeout})
plan = make_plan([45 if what == "batch" and rank == culprit else 46], cp_size=size, tokens_per_rank=16)
comm.warm_up()
good = make_plan([46], cp_size=size, tokens_per_rank=16)
run_rank(comm, good, Model(), random_inputs(good, Model(), 0))  # everything is imported and compiled
print("ready", flush=True)
sys.stdin.readline()
if rank == culprit and what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
comm.agree(plan.digest)
while True:
    run_rank(comm, plan, Model(), random_inputs(plan, Model(), 0))
""".replace("{timeout}", str(FCP_TIMEOUT_S))


@pytest.mark.parametrize("what", ["kill", "stop", "batch"])
def test_processes_end_with_an_error(what: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, (rank, SIZE, CULPRIT, store.port)), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        if what == "kill":
            time.sleep(1.0)  # in the middle of an attention
            ranks[CULPRIT].kill()
        # Python itself takes a second of CPU time to end; where others crowd the machine, allow for that.
        limit = LIMIT_S if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 4 * LIMIT_S
        start = time.monotonic()
        for rank in range(SIZE):
            if rank == CULPRIT and what != "batch":
                continue
            _, errors = ranks[rank].communicate(timeout=limit - (time.monotonic() - start))
            assert ranks[rank].returncode not in (0, None, -signal.SIGKILL)
            named = {
                "kill": f"cause: rank {CULPRIT} died",
                "stop": f"cause: rank {CULPRIT} gave no sign of life",
                "batch": f"rank {CULPRIT} differs from ranks 0 and 2",
            }
            assert named[what] in errors, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
