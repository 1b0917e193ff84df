"""What a patched Megatron-LM calls: its own arguments file asks for FCP's flags (``patches/`` has the patches)."""

from __future__ import annotations

import argparse

from megatron_fcp.integration import arguments, hooks


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FCP's flags to Megatron's parser and put FCP's hooks in place.

    Called at the end of ``add_megatron_arguments`` in ``megatron/training/arguments.py``: before Megatron parses its
    command line, after it and the script have imported each other. Under the launcher, or after a script's own
    ``register()``, the flags come from there and this does nothing.

    Raises
    ------
    RuntimeError
        If Megatron is not a release whose seams are known; names release and seam.
    """
    if hooks.adds_flags():
        return parser
    if not hooks.is_registered():
        hooks.register(flags=False)
    return arguments.extend(parser)
