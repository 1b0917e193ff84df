"""``python -m megatron_fcp.run``: an unmodified script gets the flags, its own folder and its own command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fcp_runs import fcp

from megatron_fcp.testing.loop import PRETRAIN_SCRIPT, tiny_model_args

pytestmark = pytest.mark.megatron

SCRIPT = '''
"""A user's script: from-imports at its top, nothing of FCP."""
import sys
from pathlib import Path

from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training.arguments import parse_args, validate_args
from neighbour import ANSWER  # lies beside the script

args = validate_args(parse_args())
print("answer", ANSWER, "name", __name__, "file", Path(__file__).name, "argv", Path(sys.argv[0]).name)
print("backend", args.context_parallel_backend, "block", args.fcp_block_size)
print("replaced", "fcp" in get_batch_on_this_cp_rank.__code__.co_filename)
'''


def launch(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env={**variables, **environment}, capture_output=True, text=True, timeout=180
    )


def test_unmodified_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("ANSWER = 42\n")
    argv = tiny_model_args(**fcp("resident"))
    run = ("-m", "megatron_fcp.run", "--fcp-platform", "cpu", str(tmp_path / "script.py"))
    done = launch(*run, *argv, WORLD_SIZE="2", RANK="0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "answer 42 name __main__ file script.py argv script.py" in done.stdout
    assert "backend fcp block 8" in done.stdout
    assert "replaced True" in done.stdout
    assert "FCP: resident layout, 8 blocks of 8 tokens on each of 2 ranks" in done.stdout


def test_torchrun_trains_the_example(tmp_path: Path) -> None:
    argv = tiny_model_args(**fcp("reshuffle"), train_iters=2)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = launch(*torchrun, "-m", "megatron_fcp.run", "--fcp-platform", "cpu", str(PRETRAIN_SCRIPT), *argv)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(value) for value in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 6


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no_such_script.py"], ("SCRIPT 'no_such_script.py' does not exist",)),
        (["--fcp-platform", "tpu", "x.py"], ("--fcp-platform", "'tpu'", "cpu")),
        ([], ("SCRIPT",)),
    ],
)
def test_bad_command_lines(argv: list[str], words: tuple[str, ...]) -> None:
    done = launch("-m", "megatron_fcp.run", *argv)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
