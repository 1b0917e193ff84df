"""Attention kernels behind one interface: ranges of queries and keys in, (out, lse) or gradients out."""

from megatron_fcp.runtime.kernels.base import Gradients, Kernel, Request, Rows, WorkList
from megatron_fcp.runtime.kernels.registry import KERNELS, capability_table, select_kernel

__all__ = ["KERNELS", "Gradients", "Kernel", "Request", "Rows", "WorkList", "capability_table", "select_kernel"]
