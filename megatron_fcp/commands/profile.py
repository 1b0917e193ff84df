"""``megatron-fcp profile``: this machine's kernels and transfers as a hardware file for the other instruments."""

from __future__ import annotations

import argparse
import os

from megatron_fcp.commands.arguments import at_least, check_heads
from megatron_fcp.commands.output import check_output, naming, note, print_json, progress
from megatron_fcp.simulate.hardware import HardwareModel

SECONDS_PER_SHAPE = 0.6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("--output", metavar="FILE", default="local.yaml", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu (one thread per rank) or cuda (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--num-heads", type=at_least(1), default=4)
    parser.add_argument("--num-kv-heads", type=at_least(1), default=2)
    parser.add_argument("--head-dim", type=at_least(1), default=64)
    parser.add_argument("--longest", type=at_least(256), default=2048, help="longest query (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the measurements and the fit as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write."""
    check_output("--output", arguments.output)
    check_heads(arguments.num_heads, arguments.num_kv_heads)
    from megatron_fcp.testing.measure import KernelBench, fit_link, fit_rates, measure_links, shapes

    grid = shapes(arguments.longest)
    bench = KernelBench(
        arguments.device, arguments.dtype, arguments.num_heads, arguments.num_kv_heads, arguments.head_dim
    )
    note(
        f"{len(grid)} kernel shapes and the link between two processes, about {len(grid) * SECONDS_PER_SHAPE + 8:.0f} s"
    )
    samples = []
    with progress(len(grid), "measuring") as step:
        for q, kv in grid:
            samples.append(bench.measure(q, kv))
            step(f"{q} queries, {kv} keys")
    kernel = fit_rates(samples, bench.flops_per_pair)
    links = measure_links(arguments.device)
    latency, rate = fit_link(links)
    model = HardwareModel(
        name="local",
        kernel_flops=kernel.flops,
        backward_rate=kernel.backward_rate,
        q_half=kernel.q_half,
        kv_half=kernel.kv_half,
        inter_bytes_per_s=rate,
        intra_bytes_per_s=rate,
        latency_s=latency,
        ranks_per_node=1,
        memory_bytes=_memory(arguments.device),
        sms=_sms(arguments.device),
        comm_sms=0,
    )
    with naming("--output", arguments.output):
        model.to_yaml(arguments.output)
    if arguments.json:
        print_json({"model": vars(model), "kernels": [s._asdict() for s in samples], "links": links})
    else:
        print(
            f"{arguments.output}: {bench.name}, {kernel.flops / 1e9:.1f} GFLOP/s forward, backward at "
            f"{kernel.backward_rate:.2f} of that, half lengths {kernel.q_half:.0f} and {kernel.kv_half:.0f} tokens "
            f"(fit within {kernel.spread:.0%}); link {latency * 1e6:.0f} us + {rate / 1e9:.2f} GB/s"
        )
    return 0


def _memory(device: str) -> float:
    if device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory)


def _sms(device: str) -> int:
    if device == "cpu":
        return os.cpu_count() or 1
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)
