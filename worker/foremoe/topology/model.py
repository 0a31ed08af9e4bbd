"""The machine as the planner sees it: where each rank sits and how fast its links are.

Two groupings matter. A *node* is one host; traffic that leaves it uses the network card. An *NVLink
domain* is a set of ranks with all-to-all GPU links; it may be the node (8 GPUs of an HGX board), span
nodes (a rack of NVL72) or be a part of one (two islands of four). The two must nest, since then the
cheapest split of tokens is found exactly by serving ever larger groups (`planner/_split.py`).

The JSON form is what the operator hands to a job and what `foremoe simulate --topology` reads:
`{"ranks": [{"node": "gpu-0", "domain": "gpu-0"}, ...], "domainLink": {...}, "networkLink": {...}}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from foremoe.checked import validated
from foremoe.errors import PlannerError
from foremoe.topology.locality import Locality, locality_of

MAX_RANKS = 1024

_MODEL = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False)


class Link(BaseModel):
    """One kind of link, per GPU and direction."""

    model_config = _MODEL

    bandwidth_bytes_per_second: float = Field(gt=0, description="Sustained bytes a second, per GPU and direction.")
    latency_seconds: float = Field(default=0.0, ge=0, le=10, description="Time of an empty message.")


class RankPlace(BaseModel):
    """Where one rank sits."""

    model_config = _MODEL

    node: str = Field(min_length=1, max_length=253, description="Host of the rank.")
    domain: str | None = Field(
        default=None, min_length=1, max_length=253, description="NVLink domain; the node if not given."
    )
    replica_memory_bytes: int | None = Field(
        default=None, ge=0, description="Memory this rank can give to expert replicas; no limit if not given."
    )


class Topology(BaseModel):
    """Ranks of one EP group, in rank order, and the links between them. Immutable."""

    model_config = _MODEL

    ranks: tuple[RankPlace, ...] = Field(min_length=1, max_length=MAX_RANKS, description="One entry per rank.")
    # Data sheets of H100 SXM: NVLink 900 GB/s in both directions together; one 400 Gb/s card per GPU.
    domain_link: Link = Field(
        default=Link(bandwidth_bytes_per_second=450e9, latency_seconds=5e-6),
        description="Between ranks of one NVLink domain.",
    )
    network_link: Link = Field(
        default=Link(bandwidth_bytes_per_second=50e9, latency_seconds=15e-6),
        description="Between ranks of different NVLink domains.",
    )
    measured_bytes_per_second: tuple[tuple[float, ...], ...] | None = Field(
        default=None, description="Measured bandwidth from rank (row) to rank (column); the diagonal is ignored."
    )

    @classmethod
    def uniform(cls, *, ranks: int, ranks_per_node: int, ranks_per_domain: int | None = None) -> Topology:
        """Equal nodes of consecutive ranks; domains equal nodes unless `ranks_per_domain` is given.

        Raises PlannerError if the sizes do not divide.
        """
        per_domain = ranks_per_node if ranks_per_domain is None else ranks_per_domain
        for name, value in (("ranks", ranks), ("ranks_per_node", ranks_per_node), ("ranks_per_domain", per_domain)):
            if value < 1:
                raise PlannerError(f"{name} must be at least 1, got {value}")
        for size in (ranks_per_node, per_domain):
            if ranks % min(size, ranks):
                raise PlannerError(f"{ranks} ranks do not divide into groups of {size}")
        return cls.of_places(
            [(f"node-{rank // ranks_per_node}", f"domain-{rank // per_domain}") for rank in range(ranks)]
        )

    @classmethod
    def of_places(cls, places: Sequence[tuple[str, str]]) -> Topology:
        """From (node, domain) of every rank. Raises PlannerError if they do not nest."""
        return cls.checked({"ranks": [{"node": node, "domain": domain} for node, domain in places]})

    @classmethod
    def checked(cls, data: object) -> Topology:
        """Like `model_validate`, or `model_validate_json` for text, but raises PlannerError in one line."""
        return validated(cls, data, what="topology", root="topology")

    @model_validator(mode="after")
    def _consistent(self) -> Topology:
        node_R, domain_R = self.node_R, self.domain_R
        if not (_refines(node_R, domain_R) or _refines(domain_R, node_R)):
            raise ValueError("nodes and NVLink domains must nest: one must be a part of the other everywhere")
        if self.measured_bytes_per_second is not None:
            rows = self.measured_bytes_per_second
            if len(rows) != self.size or any(len(row) != self.size for row in rows):
                raise ValueError(f"measuredBytesPerSecond must be {self.size} x {self.size}")
            for source, row in enumerate(rows):
                if any(value <= 0 for target, value in enumerate(row) if target != source):
                    raise ValueError(f"measuredBytesPerSecond of rank {source} must be positive")
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def node_R(self) -> npt.NDArray[np.int64]:
        """Node index of every rank, numbered by first appearance: int64 [R]."""
        return _numbered([place.node for place in self.ranks])

    @cached_property
    def domain_R(self) -> npt.NDArray[np.int64]:
        """NVLink domain index of every rank: int64 [R]."""
        return _numbered([place.domain or place.node for place in self.ranks])

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.node_R.max()) + 1

    @cached_property
    def domains(self) -> int:
        """Number of NVLink domains."""
        return int(self.domain_R.max()) + 1

    @cached_property
    def locality(self) -> Locality:
        """Nodes and domains as nested groups, for the planner's kernels."""
        return locality_of(self.node_R, self.domain_R)

    @cached_property
    def replica_memory_R(self) -> npt.NDArray[np.int64]:
        """Bytes each rank gives to replicas, the largest int64 where unlimited: int64 [R]."""
        top = np.iinfo(np.int64).max
        return np.array(
            [top if place.replica_memory_bytes is None else place.replica_memory_bytes for place in self.ranks],
            dtype=np.int64,
        )

    @property
    def domain_bytes_per_second(self) -> float:
        """What the slowest rank sustains to all others of its NVLink domain at once."""
        return self._sustained(self.domain_link, inside=True)

    @property
    def network_bytes_per_second(self) -> float:
        """What the slowest rank sustains to all ranks of other domains at once."""
        return self._sustained(self.network_link, inside=False)

    def _sustained(self, link: Link, *, inside: bool) -> float:
        """Equal shares to all peers take the mean of the time per byte; an exchange waits for the slowest rank."""
        if self.measured_bytes_per_second is None:
            return link.bandwidth_bytes_per_second
        peers_RR = (self.domain_R[:, None] == self.domain_R) == inside
        np.fill_diagonal(peers_RR, False)
        if not peers_RR.any():
            return link.bandwidth_bytes_per_second
        seconds_RR = np.divide(1.0, self.measured_bytes_per_second, where=peers_RR, out=np.zeros(peers_RR.shape))
        mean_R = seconds_RR.sum(axis=1) / np.maximum(peers_RR.sum(axis=1), 1)
        return float(1.0 / mean_R.max())

    def subset(self, ranks: Sequence[int]) -> Topology:
        """Topology of some of the ranks, in the order given (one EP group of a larger job)."""
        for rank in ranks:
            if not 0 <= rank < self.size:
                raise PlannerError(f"the topology has {self.size} ranks", rank=rank)
        measured = self.measured_bytes_per_second
        update: dict[str, Any] = {"ranks": [self.ranks[rank] for rank in ranks]}
        if measured is not None:
            update["measured_bytes_per_second"] = [[measured[a][b] for b in ranks] for a in ranks]
        links = {"domain_link": self.domain_link, "network_link": self.network_link}
        return Topology.checked({**update, **links})


def _numbered(names: Sequence[str]) -> npt.NDArray[np.int64]:
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([index[name] for name in names], dtype=np.int64)


def _refines(fine_R: npt.NDArray[np.int64], coarse_R: npt.NDArray[np.int64]) -> bool:
    """True if every fine group lies inside one coarse group."""
    pairs = np.unique(np.stack([fine_R, coarse_R]), axis=1)
    return bool(pairs.shape[1] == int(fine_R.max()) + 1)
