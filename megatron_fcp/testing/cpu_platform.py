"""Run Megatron's own training loop on CPUs over gloo: call :func:`install` before the first ``import megatron``.

For tests and for trying things on a machine without a GPU. The loop, the optimizer, the schedules and the datasets
stay Megatron's own; :mod:`megatron_fcp.testing.cpu_torch` stands in for ``torch.cuda`` and
:mod:`megatron_fcp.testing.cpu_megatron` lists the gaps Megatron has without Transformer Engine. Nothing happens at
import, and nothing happens where a GPU is present unless asked for.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["install", "is_installed"]

_installed = False


def is_installed() -> bool:
    """Whether :func:`install` has turned this process into the CPU platform."""
    return _installed


def install(*, force: bool = False) -> bool:
    """Turn this process into the CPU platform.

    A second call does nothing. There is no way back in the same process.

    Parameters
    ----------
    force : bool, optional
        Install although a CUDA device is available.

    Returns
    -------
    bool
        Whether the platform is active now: False when a CUDA device is there and `force` is not set.

    Raises
    ------
    RuntimeError
        When Megatron was imported before: its modules have bound parts of torch by name already.
    """
    global _installed
    if _installed:
        return True
    if torch.cuda.is_available() and not force:
        return False
    if any(name == "megatron" or name.startswith("megatron.") for name in sys.modules):
        raise RuntimeError("cpu_platform.install() must be called before the first import of megatron")
    from megatron_fcp.testing import cpu_megatron, cpu_torch

    cpu_torch.fake_cuda()
    _installed = True
    cpu_megatron.close_gaps()
    return True
