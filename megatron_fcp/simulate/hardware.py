"""Clusters as numbers: kernel speed by shape, two network tiers, SMs that communication takes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_fcp.files import write_whole
from megatron_fcp.plan.cost import CostModel


@dataclass(frozen=True)
class HardwareModel:
    """One kind of cluster; read and write it as YAML with :func:`load_hardware` and :meth:`to_yaml`.

    Attributes
    ----------
    name : str
    kernel_flops : float
        FLOP/s of the forward attention kernel on long inputs, all SMs.
    backward_rate : float
        Rate of the backward kernel as a fraction of the forward one's.
    q_half, kv_half : float
        Query and KV lengths (tokens of one document in one call) at which the rate halves.
    inter_bytes_per_s, intra_bytes_per_s : float
        Per rank and direction, between nodes and inside a node.
    latency_s : float
        Per transfer.
    ranks_per_node : int
        1 means one flat network, priced at ``inter_bytes_per_s``.
    memory_bytes : float
        Per rank.
    sms, comm_sms : int
        SMs per rank, and how many of them communication occupies.
    speeds : tuple of float
        Compute speed of each context-parallel rank relative to ``kernel_flops``; empty, or left out: all 1.

    Raises
    ------
    ValueError
        If a number is missing, not positive or not finite; names it.
    """

    name: str
    kernel_flops: float
    backward_rate: float
    q_half: float
    kv_half: float
    inter_bytes_per_s: float
    intra_bytes_per_s: float
    latency_s: float
    ranks_per_node: int
    memory_bytes: float
    sms: int
    comm_sms: int
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str):
            raise ValueError(f"hardware {name!r}: the name must be text")
        for field in dataclasses.fields(self):
            if field.name in ("name", "speeds"):
                continue
            value = getattr(self, field.name)
            whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"hardware {self.name!r}: {field.name} must be a number, got {value!r}")
            lowest = 0 if field.name == "comm_sms" else 1e-300
            if not lowest <= value <= 1e300:  # NaN is not, either
                raise ValueError(f"hardware {self.name!r}: {field.name} must be positive, got {value!r:.40}")
        object.__setattr__(self, "speeds", tuple(self._checked_speeds()))
        if self.comm_sms >= self.sms:
            raise ValueError(
                f"hardware {self.name!r}: comm_sms {self.comm_sms} leaves nothing of {self.sms} SMs for compute"
            )

    def _checked_speeds(self) -> list[float]:
        values: object = self.speeds
        if not isinstance(values, (list, tuple)):
            raise ValueError(f"hardware {self.name!r}: speeds must be a list of one number per rank, got {values!r}")
        out: list[float] = []
        for rank, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"hardware {self.name!r}: the speed of rank {rank} must be positive, got {value!r}")
            out.append(float(value))
        return out

    def cost(self, shape: AttentionShape | None = None) -> CostModel:
        """Numbers for the planner, for one rank's heads."""
        shape = shape or AttentionShape()
        return CostModel(
            pair_s=shape.flops_per_pair / (self.kernel_flops * (1 - self.comm_sms / self.sms)),
            q_half=self.q_half,
            kv_half=self.kv_half,
            kv_bytes=shape.kv_bytes_per_token,
            inter_bytes_per_s=self.inter_bytes_per_s,
            intra_bytes_per_s=self.intra_bytes_per_s,
            latency_s=self.latency_s,
            ranks_per_node=self.ranks_per_node,
            speeds=self.speeds,
        )

    def to_yaml(self, path: str | Path, comment: str = "") -> None:
        """Write the model as YAML, below ``comment`` line by line."""
        import yaml

        values = {**dataclasses.asdict(self), "speeds": list(self.speeds)}
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        write_whole(path, head + yaml.safe_dump(values, sort_keys=False))


@dataclass(frozen=True)
class AttentionShape:
    """Heads that one rank computes; the default is Llama-3-70B's attention without tensor parallelism."""

    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    bytes_per_element: int = 2

    @property
    def flops_per_pair(self) -> int:
        """Forward FLOP of one query-key pair: QK^T and PV."""
        return 4 * self.num_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element


# Kernels: FlashAttention-3 on H100 reaches 673-686 TFLOP/s forward and 562-586 backward on causal d128 documents of
# 16K-32K, 585 at 2K and 283 at 1K (MagiAttention's published benchmark); 660 with half lengths of 100 fits full
# rectangles. B200: FlashAttention-4 1366-1390 forward (same source). The flat presets are the compute-to-network ratios
# of arXiv 2605.08524's two anonymised clusters, 5920 and 2500 FLOP per byte.
# Networks: 400G InfiniBand gives 45-49 GB/s beyond 2 MB after about 10 us (https://github.com/uccl-project/uccl/issues/931).
# NVLink 4: 363 GB/s bus bandwidth on 8 H200 (NCCL all_gather, large); 180-260 GB/s for a pair of H100
# (https://github.com/NVIDIA/nccl-tests/issues/268), 450 GB/s by specification. NVLink 5 doubles that.
# The rates are net of what communication takes, hence comm_sms 0.
PRESETS: dict[str, HardwareModel] = {
    model.name: model
    for model in (
        HardwareModel("flat5920", 148e12, 0.85, 100, 100, 25e9, 25e9, 10e-6, 1, 80e9, 132, 0),
        HardwareModel("flat2500", 2250e12, 0.85, 100, 100, 900e9, 900e9, 10e-6, 1, 180e9, 148, 0),
        HardwareModel("h100-ib", 660e12, 0.85, 100, 100, 45e9, 300e9, 10e-6, 8, 80e9, 132, 0),
        HardwareModel("h200-ib", 660e12, 0.85, 100, 100, 45e9, 360e9, 10e-6, 8, 141e9, 132, 0),
        HardwareModel("b200-nvl72", 1380e12, 0.85, 100, 100, 45e9, 700e9, 10e-6, 72, 180e9, 148, 0),
    )
}


_REMEDY = "`megatron-fcp profile` writes such a file"


def load_hardware(name_or_path: str) -> HardwareModel:
    """A preset by name, or a model from a YAML file.

    Raises
    ------
    ValueError
        If there is neither, or if the file lacks a number, has an unknown one or a bad one.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"--hardware {name_or_path!r} is neither a file nor one of {', '.join(PRESETS)}")
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--hardware {path}: not YAML ({error}); {_REMEDY}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--hardware {path}: expected a mapping of names to numbers; {_REMEDY}")
    known = {field.name for field in dataclasses.fields(HardwareModel)}
    for what, names in (
        ("lacks", known - values.keys() - {"speeds"}),
        ("has the unknown entry", values.keys() - known),
    ):
        if names:
            raise ValueError(f"--hardware {path} {what} {', '.join(sorted(map(str, names)))}; {_REMEDY}")
    floats = {f.name for f in dataclasses.fields(HardwareModel) if f.type == "float"}
    for name in floats & values.keys():  # YAML 1.1 reads 1e12 as text
        if isinstance(values[name], str):
            try:
                values[name] = float(values[name])
            except ValueError:
                raise ValueError(f"--hardware {path}: {name} must be a number, got {values[name]!r}") from None
    try:
        return HardwareModel(**values)
    except ValueError as error:
        raise ValueError(f"--hardware {path}: {error}") from error
