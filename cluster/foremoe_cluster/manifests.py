"""The objects every cluster of ours starts with."""

from foremoe_cluster.api import Manifest
from foremoe_cluster.settings import DNS_ADDRESS, HOST_ADDRESS, STORAGE_CLASS

RBAC = "rbac.authorization.k8s.io"
PROVISIONER = "foremoe.io/shared-volumes"


def all_manifests() -> list[Manifest]:
    """Rights of the programs that run beside the cluster, its DNS service, its storage class."""
    return [
        _binding("foremoe:kube-proxy", "system:node-proxier", "system:kube-proxy"),
        _role(
            "foremoe:coredns",
            _rule("", ["endpoints", "services", "pods", "namespaces"], ["list", "watch"]),
            _rule("discovery.k8s.io", ["endpointslices"], ["list", "watch"]),
        ),
        _binding("foremoe:coredns", "foremoe:coredns", "system:coredns"),
        _role(
            "foremoe:volumes",
            _rule("", ["persistentvolumeclaims"], ["list"]),
            _rule("", ["persistentvolumes"], ["list", "patch", "create", "delete"]),
        ),
        _binding("foremoe:volumes", "foremoe:volumes", "foremoe:volumes"),
        *dns_service(),
        storage_class(),
    ]


def dns_service() -> list[Manifest]:
    """kube-dns without a selector: CoreDNS is a process of the host, so its endpoint is written by hand."""
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-host",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
            "ports": ports,
        },
    ]


def storage_class() -> Manifest:
    """The default class: folders of the host that all nodes see, hence ReadWriteMany (see `volumes`)."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }


def _rule(group: str, resources: list[str], verbs: list[str]) -> dict[str, list[str]]:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _role(name: str, *rules: dict[str, list[str]]) -> Manifest:
    return {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": list(rules)}


def _binding(name: str, role: str, user: str) -> Manifest:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "name": user, "apiGroup": RBAC}],
    }
