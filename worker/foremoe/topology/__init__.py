"""What the planner knows of the machine: ranks, nodes, NVLink domains, links."""

from foremoe.topology.locality import Locality
from foremoe.topology.model import Link, RankPlace, Topology

__all__ = ["Link", "Locality", "RankPlace", "Topology"]
