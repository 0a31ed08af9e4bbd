"""Configuration of every program, as pure functions of settings.

Kubernetes' files are YAML, and JSON is YAML, so they are plain dictionaries here. Values that look
odd are limits of small machines: no CAP_SYS_RESOURCE (no negative OOM scores, a fixed file limit),
cgroup v1, several kubelets side by side (docs/cluster.md lists them).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from foremoe_cluster.settings import (
    CLUSTER_DOMAIN,
    DNS_ADDRESS,
    HOST_ADDRESS,
    PAUSE_IMAGE,
    PKI,
    POD_NETWORK,
    RUN,
    SERVICE_NETWORK,
    STATE,
    Node,
)

ETCD_CLIENT = "http://127.0.0.1:12379"
ETCD_PEER = "http://127.0.0.1:12380"
DNS_READY = "127.0.0.1:18181"


def etcd(bin_: Path) -> list[str]:
    """The store is thrown away at `down`, so it does not wait for the disk."""
    return [
        f"{bin_}/etcd", f"--data-dir={STATE}/etcd", "--unsafe-no-fsync",
        f"--listen-client-urls={ETCD_CLIENT}", f"--advertise-client-urls={ETCD_CLIENT}",
        f"--listen-peer-urls={ETCD_PEER}", f"--initial-advertise-peer-urls={ETCD_PEER}",
        f"--initial-cluster=default={ETCD_PEER}",
    ]  # fmt: skip


def apiserver(bin_: Path) -> list[str]:
    """Bound to the bridge: with a loopback address there would be no endpoint of `kubernetes` for pods."""
    return [
        f"{bin_}/kube-apiserver", f"--etcd-servers={ETCD_CLIENT}", "--secure-port=6443",
        f"--bind-address={HOST_ADDRESS}", f"--advertise-address={HOST_ADDRESS}",
        f"--tls-cert-file={PKI}/apiserver.crt", f"--tls-private-key-file={PKI}/apiserver.key",
        f"--client-ca-file={PKI}/ca.crt", "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
        f"--kubelet-client-certificate={PKI}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={PKI}/apiserver-kubelet-client.key",
        f"--kubelet-certificate-authority={PKI}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        f"--service-account-key-file={PKI}/sa.pub", f"--service-account-signing-key-file={PKI}/sa.key",
        f"--requestheader-client-ca-file={PKI}/ca.crt", "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={PKI}/front-proxy-client.crt",
        f"--proxy-client-key-file={PKI}/front-proxy-client.key",
    ]  # fmt: skip


def controller_manager(bin_: Path) -> list[str]:
    """A lost node is noticed after 20 s; the nodes' leases (see `kubelet`) are renewed every 5 s."""
    return [
        f"{bin_}/kube-controller-manager", *_own_kubeconfig("controller-manager"), "--bind-address=127.0.0.1",
        "--leader-elect=false", "--use-service-account-credentials",
        f"--service-account-private-key-file={PKI}/sa.key", f"--root-ca-file={PKI}/ca.crt",
        f"--cluster-signing-cert-file={PKI}/ca.crt", f"--cluster-signing-key-file={PKI}/ca.key",
        "--node-monitor-period=2s", "--node-monitor-grace-period=20s",
    ]  # fmt: skip


def scheduler(bin_: Path) -> list[str]:
    """Alone, so without election."""
    return [f"{bin_}/kube-scheduler", *_own_kubeconfig("scheduler"), "--bind-address=127.0.0.1", "--leader-elect=false"]


def coredns(bin_: Path) -> list[str]:
    """Reads `corefile`."""
    return [f"{bin_}/coredns", "-conf", f"{RUN}/Corefile"]


def corefile() -> str:
    """Names of the cluster only. A short TTL, because pods of a restarted job come back with new addresses."""
    return f""".:53 {{
  bind {HOST_ADDRESS}
  health 127.0.0.1:18080
  ready {DNS_READY}
  errors
  cache 5
  kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
    kubeconfig {PKI}/coredns.kubeconfig
    pods insecure
    ttl 5
  }}
}}
"""


def kubelet(node: Node) -> str:
    """The node's KubeletConfiguration."""
    return _json(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node.address,
            "port": 10250,
            "readOnlyPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{PKI}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{PKI}/{node.name}.crt",
            "tlsPrivateKeyFile": f"{PKI}/{node.name}.key",
            "containerRuntimeEndpoint": f"unix://{node.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": node.cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": ["pods"],
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": "",
            "maxOpenFiles": 20000,
            "oomScoreAdj": 0,
            "nodeLeaseDurationSeconds": 20,
            "imageGCHighThresholdPercent": 100,
            # All nodes share the machine's disk, so that evicting pods from one would free it for nobody.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "0%",
                "nodefs.inodesFree": "0%",
                "imagefs.available": "0%",
            },
        }
    )


def kube_proxy(node: Node) -> str:
    """nftables mode; conntrack limits are left alone, they are not writable in a network namespace."""
    return _json(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": f"{PKI}/kube-proxy.kubeconfig"},
            "hostnameOverride": node.name,
            "clusterCIDR": POD_NETWORK,
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
        }
    )


def containerd(node: Node, bin_: Path) -> str:
    """The node's containerd. `restrict_oom_score_adj`: without it every sandbox dies where scores cannot be lowered.

    Plugins of the node resource interface there are none, and its socket would lie in the host's /run.
    """
    return f"""version = 3
root = "{node.images}"
state = "/run/containerd"
[grpc]
  address = "{node.socket}"
[ttrpc]
  address = "{node.socket}.ttrpc"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{bin_}"]
    conf_dir = "{node.folder}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "{bin_}/runc"
      SystemdCgroup = false
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.internal.v1.opt']
  path = "{node.folder}/opt"
"""


def image_containerd(node: Node, folder: Path) -> str:
    """A containerd that only writes the images of a node that does not run."""
    return f"""version = 3
root = "{node.images}"
state = "{folder}/state"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
[plugins.'io.containerd.internal.v1.opt']
  path = "{folder}/opt"
"""


def cni(node: Node) -> str:
    """One bridge per node; pods reach each other by routes, without address translation."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pod_subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": f"{node.folder}/addresses",
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return _json({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]})


def kubelet_arguments(node: Node, labels: dict[str, str]) -> list[str]:
    """What has no place in the configuration file."""
    pairs = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return [
        f"--config={node.folder}/kubelet.json", f"--kubeconfig={PKI}/{node.name}.kubeconfig",
        f"--hostname-override={node.name}", f"--node-ip={node.address}", f"--node-labels={pairs}", "--v=2",
    ]  # fmt: skip


def routes(node: Node, nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """(subnet, gateway) the node needs to reach the pods of the others."""
    return [(other.pod_subnet, other.address) for other in nodes if other != node]


def gpu_labels(node: Node, gpus: int) -> dict[str, str]:
    """Labels as GPU Feature Discovery and a network topology source would set them on a GB200 machine.

    Each node is an NVLink domain of its own (clique), both hang on one leaf switch. The devices are
    stand-ins, and a label of ours says so.
    """
    if gpus == 0:
        return {}
    return {
        "foremoe.io/stand-in-gpus": "true",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": "NVIDIA-GB200",
        "nvidia.com/gpu.family": "blackwell",
        "nvidia.com/gpu.machine": "STAND-IN",
        "nvidia.com/gpu.count": str(gpus),
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.memory": "189471",
        "nvidia.com/gpu.compute.major": "10",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.mode": "compute",
        "nvidia.com/gpu.clique": f"00000000-0000-0000-0000-{node.number:012d}.1",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/cuda.driver-version.full": "580.95.05",
        "nvidia.com/cuda.driver-version.major": "580",
        "nvidia.com/cuda.driver-version.minor": "95",
        "nvidia.com/cuda.driver-version.revision": "05",
        "network.topology.nvidia.com/accelerator": f"nvl-{node.number}",
        "network.topology.nvidia.com/leaf": "leaf-1",
        "network.topology.nvidia.com/spine": "spine-1",
        "topology.kubernetes.io/region": "local",
        "topology.kubernetes.io/zone": "local-a",
    }


def _own_kubeconfig(name: str) -> list[str]:
    path = f"{PKI}/{name}.kubeconfig"
    return [f"--kubeconfig={path}", f"--authentication-kubeconfig={path}", f"--authorization-kubeconfig={path}"]


def _json(document: dict[str, object]) -> str:
    return json.dumps(document, indent=1) + "\n"
