"""Run an unmodified Megatron script with FCP available.

    torchrun --nproc-per-node 8 -m megatron_fcp.run pretrain_gpt.py --context-parallel-backend fcp ...

The hooks are in place before the script's first import, so ``from megatron.core.utils import ...`` finds them. Without
``--context-parallel-backend fcp`` the script runs as it would by itself.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``SCRIPT ARGS`` as ``python SCRIPT ARGS`` would, with FCP registered.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fcp.run",
        description="Run a Megatron training script with --context-parallel-backend fcp available.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--fcp-platform",
        choices=("auto", "cpu"),
        default="auto",
        help="cpu: run Megatron on CPUs over gloo (tests, trying things out). auto: whatever is there.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the Megatron script, such as pretrain_gpt.py")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not os.path.isfile(options.script):
        parser.error(f"SCRIPT {options.script!r} does not exist; give the path of a Megatron training script")
    # As for `python SCRIPT`: the script's folder leads the path, and it sees its own command line. This comes first: in
    # a checkout of Megatron-LM that folder holds the Megatron to run, and it goes before an installed one.
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    if options.fcp_platform == "cpu":
        from megatron_fcp.testing import cpu_platform

        cpu_platform.install(force=True)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it, and means GPUs
    from megatron_fcp.integration import register

    register(launcher=True)
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
