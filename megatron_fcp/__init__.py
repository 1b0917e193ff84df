"""FCP: flexible context parallelism (arXiv 2605.08524, MLSys 2026) as a context-parallel backend for Megatron-LM."""

__version__ = "0.1.0"


def register() -> None:
    """Make ``--context-parallel-backend fcp`` known to Megatron-LM in this process; call it before its scripts run.

    Raises
    ------
    RuntimeError
        If it is already registered, or Megatron's seams are not those of a known release.
    """
    from megatron_fcp.integration import register as register_hooks

    register_hooks()
