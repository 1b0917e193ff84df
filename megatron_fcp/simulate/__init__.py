"""What a plan costs on given hardware: cost model, workloads, event simulation. Imports ``plan`` only.

::

    workloads -> lengths -> plan.make_plan -> Plan -> price -> makespan, efficiency, who waits for what
                              ^                         ^
                              +---- hardware (YAML) ----+
"""

from megatron_fcp.simulate.hardware import PRESETS, HardwareModel, load_hardware
from megatron_fcp.simulate.price import Price, price_plan
from megatron_fcp.simulate.workloads import WORKLOADS, draw_lengths

__all__ = ["PRESETS", "WORKLOADS", "HardwareModel", "Price", "draw_lengths", "load_hardware", "price_plan"]
