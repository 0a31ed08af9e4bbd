"""The bridge between host and nodes, and the guard that keeps its packets on this machine.

The host end of every node's cable is on the bridge; the other end is `eth0` in the node. The host
reaches pods through the nodes, and services through the first node, whose kube-proxy translates.
The host neither forwards nor gets rules of kube-proxy: its own network stays as it was.
"""

import shutil
from pathlib import Path

from foremoe_cluster.settings import BRIDGE, FIREWALL_TABLE, HOST_ADDRESS, LINK_PREFIX, SERVICE_NETWORK, Node
from foremoe_cluster.shell import run

GUARD = f"""
table inet {FIREWALL_TABLE} {{
  chain guard {{
    type filter hook forward priority -10; policy accept;
    iifname "{BRIDGE}" oifname != "{BRIDGE}" drop
  }}
}}
"""


def create_bridge() -> None:
    """The bridge with the host's address, and the guard: also where the host forwards, nothing gets out."""
    run("nft", "-f", "-", stdin=GUARD)
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST_ADDRESS}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def plug_in(node: Node, pid: int) -> None:
    """A cable from the bridge into the network namespace of process `pid`; the node configures its own end."""
    run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", node.link, "master", BRIDGE, "up")
    run("ip", "route", "replace", node.pod_subnet, "via", node.address)
    if node.number == 1:
        run("ip", "route", "replace", SERVICE_NETWORK, "via", node.address)


def links() -> list[str]:
    """Our links on the host."""
    names = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return [name for name in names if name == BRIDGE or name.startswith(LINK_PREFIX)]


def remove_link(name: str) -> None:
    """Remove one of our links; its routes go with it."""
    run("ip", "link", "delete", name)


def guards() -> list[str]:
    """Our firewall table, if it is there."""
    if shutil.which("nft") is None:
        return []
    return [FIREWALL_TABLE] if f"table inet {FIREWALL_TABLE}" in run("nft", "list", "tables").splitlines() else []


def remove_guard(table: str) -> None:
    """Remove our firewall table."""
    run("nft", "delete", "table", "inet", table)
