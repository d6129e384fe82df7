"""A pretend cluster: what its instances hold, how they are linked, and what a layer costs on them.

Enters: a YAML file, or the name of one that ships. Leaves: a validated ClusterFile, or a ValueError
that names the key. Does not know: schedulers, workloads, time.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from control_plane.scheduler.waiting_queue import invalidity
from nanocp.config import ClusterConfig
from nanocp.plan import Arrival

SHIPPED = Path(__file__).parent / "clusters"


@dataclass(frozen=True, slots=True)
class Costs:
    """What one layer costs on one instance. A set of constants; everything else is a load."""

    __pydantic_config__ = {"extra": "forbid"}

    attention_us: float
    """Attention of one row over no tokens."""
    attention_ps_per_token: float
    """Per KV token that the instance reads."""
    attention_ns_per_row: float
    """Per attention row, own or received: query read, partial written."""
    exchange_us: float
    """Both routes and the merge, on an instance that has a link."""
    exchange_bytes_per_link: int
    """Q there and partial back, of one row and one holder."""
    exchange_gb_per_s_within_node: float
    """Each direction."""
    exchange_gb_per_s_between_nodes: float
    exchange_us_between_nodes: float
    """In addition, on an instance with a link to another node."""
    dispatch_combine_us: float
    """Dispatch and combine of no rows."""
    dispatch_combine_us_at_128_rows: tuple[tuple[int, float], ...]
    """(EP size, microseconds of both at 128 rows an instance), ascending; linear between."""
    expert_us: float
    """Expert GEMMs of no rows: the weights are read."""
    expert_ns_per_row: float
    """Per row of the mean instance: experts are taken as balanced."""
    other_us: float
    """Norms, projections, gate, shared expert, launches."""
    other_ns_per_row: float
    step_us: float
    """Once a step: embedding, lm_head, sampling."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.dispatch_combine_us_at_128_rows]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(
                f"dispatch_combine_us_at_128_rows has EP sizes {sizes}; they must be ascending, one or more"
            )
        numbers = {item.name: getattr(self, item.name) for item in fields(self)}
        table = numbers.pop("dispatch_combine_us_at_128_rows")
        numbers |= {f"dispatch_combine_us_at_128_rows of EP size {size}": us for size, us in table}
        for name, value in numbers.items():
            if not 0 <= value < inf:
                raise ValueError(f"{name} is {value}; it must be a finite number and not negative")
        for name in ("exchange_gb_per_s_within_node", "exchange_gb_per_s_between_nodes"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; it must be more")

    def layer_attention_us(self, kv_tokens: float, rows: float) -> float:
        """Attention of a layer over so many KV tokens by so many attention rows, padding included."""
        return (
            self.attention_us
            + self.attention_ps_per_token * kv_tokens / 1e6
            + self.attention_ns_per_row * rows / 1e3
        )

    def layer_expert_us(self, mean_rows: float) -> float:
        """Expert GEMMs of a layer, for so many rows of the mean instance."""
        return self.expert_us + self.expert_ns_per_row * mean_rows / 1e3


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of the model the costs multiply."""

    __pydantic_config__ = {"extra": "forbid"}

    num_layers: int
    num_moe_layers: int
    kv_bytes_per_token: int
    """Latent KV of all layers."""

    def __post_init__(self) -> None:
        if (
            not 0 <= self.num_moe_layers <= self.num_layers
            or self.num_layers < 1
            or self.kv_bytes_per_token < 1
        ):
            raise ValueError(
                f"num_layers is {self.num_layers}, num_moe_layers {self.num_moe_layers} and kv_bytes_per_token "
                f"{self.kv_bytes_per_token}; the first and last must be positive, the second from 0 to the first"
            )


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A pretend cluster."""

    __pydantic_config__ = {"extra": "forbid"}

    cluster: ClusterConfig
    model: ModelShape
    costs: dict[str, Costs]
    """By the name of the set, such as peak and fitted."""
    ingest_gb_per_s: float
    """KV that an instance receives from prefill; its transfers wait for each other."""
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8)
    """Degrees that the length profile chooses from."""
    row_buckets: tuple[int, ...] = field(default=(8, 16, 32, 48, 64, 96, 128, 192, 256))
    """Rows of the captured graphs, ascending; the last holds max_rows."""
    attention_row_buckets: tuple[int, ...] = ()
    """Attention rows of the captured graphs, ascending. Empty: as row_buckets."""

    def __post_init__(self) -> None:
        if not 0 < self.ingest_gb_per_s < inf:
            raise ValueError(
                f"ingest_gb_per_s is {self.ingest_gb_per_s}; it must be positive and finite"
            )
        if not self.costs:
            raise ValueError("costs is empty; it must hold one set of constants or more")
        if (
            not self.cp_degrees
            or min(self.cp_degrees) < 1
            or max(self.cp_degrees) > self.cluster.num_instances
        ):
            raise ValueError(
                f"cp_degrees is {self.cp_degrees}; they must be from 1 to num_instances ({self.cluster.num_instances})"
            )
        for name in ("cp_degrees", "row_buckets", "attention_row_buckets"):
            buckets = getattr(self, name)
            if list(buckets) != sorted(set(buckets)) or (buckets and buckets[0] < 1):
                raise ValueError(f"{name} is {buckets}; they must be ascending positive integers")
        if not self.row_buckets or self.row_buckets[-1] < self.cluster.bounds.max_rows:
            raise ValueError(
                f"row_buckets is {self.row_buckets}; the last must hold max_rows ({self.cluster.bounds.max_rows})"
            )

    def costs_of(self, constants: str) -> Costs:
        """The named set. Raises ValueError naming the nearest."""
        if constants not in self.costs:
            raise ValueError(f"constants is {constants!r}; {_nearest(constants, list(self.costs))}")
        return self.costs[constants]


def shipped_names() -> list[str]:
    """Names of the cluster files that ship."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def cluster_path(name_or_path: str) -> Path:
    """Of the cluster file of that name, or the path itself (it ends in .yaml or .yml).

    Raises ValueError for an unknown name, naming the nearest.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return path
    if name_or_path not in shipped_names():
        raise ValueError(
            f"cluster is {name_or_path!r}; {_nearest(name_or_path, shipped_names())}, or a .yaml file"
        )
    return SHIPPED / f"{name_or_path}.yaml"


def load_cluster_file(name_or_path: str) -> ClusterFile:
    """The cluster file of `cluster_path`.

    Raises ValueError for an unknown name (naming the nearest), an unreadable file, an unknown key,
    a wrong type and a cluster that cannot be.
    """
    path = cluster_path(name_or_path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the cluster file {path} cannot be read: {error}") from error
    try:
        file = TypeAdapter(ClusterFile).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors()]
        raise ValueError("\n".join(f"{path}: {_sentence(detail)}" for detail in details)) from error
    max_len = file.cluster.max_model_len
    if reason := invalidity(Arrival(1, max_len - 1, 1), file.cluster):
        raise ValueError(f"{path}: a request of max_model_len ({max_len}) can never run: {reason}")
    return file


def _sentence(detail: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where} is no key of a cluster file; {_nearest(str(detail['loc'][-1]), _known_keys(detail['loc'][:-1]))}"
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{where}: {message}" if where else message
    if detail["type"] == "missing":
        return f"{where} is missing"
    wanted = (
        "a mapping of keys"
        if detail["type"] == "dataclass_type"
        else detail["msg"].removeprefix("Input should be ")
    )
    return f"{where or 'the file'} is {json.dumps(detail['input'])[:80]}; it must be {wanted}"


def _known_keys(loc: tuple[Any, ...]) -> list[str]:
    kind: Any = ClusterFile
    for part in loc:
        kind = get_type_hints(kind)[part] if is_dataclass(kind) else get_args(kind)[1]
    return [item.name for item in fields(kind)]


def _nearest(name: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"it must be one of {', '.join(names)} (nearest: {nearest})"
