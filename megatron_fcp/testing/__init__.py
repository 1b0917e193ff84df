"""Test support: the CPU platform, worker pools and small training runs of Megatron's own loop."""
