"""The worker pool: results in rank order, clean processes, and reports that say what every rank was doing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_fcp.testing.pool import JobError, WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as workers:
        yield workers


def is_running(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"
    return False


def square(value: int) -> int:
    print(f"squaring {value}")
    return value * value


def leave_a_mark(_: None) -> bool:
    already = hasattr(os, "mark_of_another_job")
    os.mark_of_another_job = True  # type: ignore[attr-defined]
    return already


def report_pid_then(argument: tuple[str, int]) -> None:
    path, rank = argument
    with open(f"{path}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == 0:
        wait_for_a_peer_that_never_comes()
    if rank == 1:
        raise KeyError("rank 1 gave up")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_peer_that_never_comes() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.accept()


def test_outcomes_come_in_rank_order_with_what_was_printed(pool: WorkerPool) -> None:
    outcomes = pool.run(square, [3, 4, 5])
    assert [outcome.value for outcome in outcomes] == [9, 16, 25]
    assert [outcome.log for outcome in outcomes] == ["squaring 3\n", "squaring 4\n", "squaring 5\n"]


def test_every_job_starts_clean(pool: WorkerPool) -> None:
    for _ in range(2):
        assert not pool.run(leave_a_mark, [None])[0].value


def test_failed_job_tells_raised_died_and_stalled_ranks_apart_and_leaves_nothing(pool: WorkerPool, tmp_path) -> None:
    with pytest.raises(JobError) as caught:
        pool.run(report_pid_then, [(str(tmp_path / "pid"), rank) for rank in range(4)], grace=0.5)
    ranks = caught.value.ranks
    assert [rank.kind for rank in ranks] == ["stalled", "raised", "died", "finished"]
    assert caught.value.errors == ["KeyError: 'rank 1 gave up'"]
    assert "wait_for_a_peer_that_never_comes" in ranks[0].log
    for part in ("raised: ranks [1]", "died: ranks [2]", "stalled: ranks [0]", "KeyError: 'rank 1 gave up'"):
        assert part in str(caught.value)
    pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(4)]
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_time_out_dumps_the_stack(pool: WorkerPool, tmp_path) -> None:
    started = time.monotonic()
    with pytest.raises(JobError, match=r"time-out 1 s.*stalled: ranks \[0\]") as caught:
        pool.run(report_pid_then, [(str(tmp_path / "pid"), 0)], timeout=1)
    assert time.monotonic() - started < 5
    assert caught.value.errors == []


def test_preload_failure_is_reported_by_the_job() -> None:
    with WorkerPool("test_pool:no_such_function") as broken, pytest.raises(JobError, match="no_such_function"):
        broken.run(square, [1])


def test_ranks_end_with_the_driver(tmp_path) -> None:
    code = (
        "import test_pool; from megatron_fcp.testing.pool import WorkerPool; "
        f"WorkerPool().run(test_pool.report_pid_then, [({str(tmp_path / 'pid')!r}, 0)])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment)
    file = tmp_path / "pid.0"
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(file.read_text())
    assert is_running(pid)
    driver.kill()
    driver.wait()
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
