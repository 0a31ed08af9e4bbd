"""Configuration of the cluster's programs: the limits of small machines are respected, names never collide."""

import json
import tomllib
from pathlib import Path

import pytest

from foremoe_cluster import configs, manifests, network, pki
from foremoe_cluster.api import path_of
from foremoe_cluster.settings import DNS_ADDRESS, KEPT, MOUNT_POINTS, STATE, Node, Settings

BIN = Path("/programs")
NODES = Settings(nodes=3).all_nodes()


def test_every_node_has_its_own_addresses_and_folders() -> None:
    for attribute in ("name", "address", "pod_subnet", "link", "cgroup", "folder", "images", "socket"):
        assert len({getattr(node, attribute) for node in NODES}) == len(NODES), attribute


def test_link_names_fit_the_kernel() -> None:
    assert all(len(node.link) <= 15 for node in Settings(nodes=9).all_nodes())


@pytest.mark.parametrize("values", [{"nodes": 0}, {"nodes": 10}, {"gpus": -1}, {"gpus": 65}])
def test_settings_without_room_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Settings(**values)


def test_settings_prefer_arguments_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREMOE_CLUSTER_NODES", "3")
    assert Settings.from_environment() == Settings(nodes=3)
    assert Settings.from_environment(nodes=1, gpus=0) == Settings(nodes=1, gpus=0)
    monkeypatch.setenv("FOREMOE_CLUSTER_GPUS", "many")
    with pytest.raises(ValueError, match="FOREMOE_CLUSTER_GPUS=many"):
        Settings.from_environment()


def test_kubelets_share_a_machine() -> None:
    for node in NODES:
        config = json.loads(configs.kubelet(node))
        assert config["cgroupRoot"] == node.cgroup
        assert config["address"] == node.address
        assert config["oomScoreAdj"] == 0 and config["maxOpenFiles"] <= 20000
        assert config["clusterDNS"] == [DNS_ADDRESS] and config["resolvConf"] == ""


def test_lost_nodes_are_noticed_only_after_several_missed_renewals() -> None:
    grace = next(each for each in configs.controller_manager(BIN) if "grace-period" in each)
    renewal = json.loads(configs.kubelet(NODES[0]))["nodeLeaseDurationSeconds"] / 4
    assert int(grace.partition("=")[2].rstrip("s")) >= 4 * renewal


def test_containerd_configuration_is_toml_and_keeps_images_apart_from_the_run() -> None:
    node = NODES[0]
    config = tomllib.loads(configs.containerd(node, BIN))
    assert config["root"] == str(node.images)
    assert any(node.images.is_relative_to(kept) for kept in KEPT)
    assert config["plugins"]["io.containerd.cri.v1.runtime"]["restrict_oom_score_adj"] is True
    offline = tomllib.loads(configs.image_containerd(node, Path("/scratch")))
    assert offline["root"] == config["root"]
    assert "io.containerd.cri.v1.runtime" in offline["disabled_plugins"]


def test_routes_lead_to_all_other_nodes() -> None:
    assert configs.routes(NODES[0], NODES) == [("10.244.2.0/24", "10.99.0.2"), ("10.244.3.0/24", "10.99.0.3")]


def test_pods_of_a_node_get_addresses_of_its_subnet() -> None:
    ipam = json.loads(configs.cni(NODES[1]))["plugins"][0]["ipam"]
    assert ipam["ranges"] == [[{"subnet": NODES[1].pod_subnet}]]


def test_gpu_labels_say_what_they_are() -> None:
    labels = configs.gpu_labels(NODES[0], 4)
    assert labels["nvidia.com/gpu.count"] == "4"
    assert labels["foremoe.io/stand-in-gpus"] == "true"
    assert all(len(value) <= 63 for value in labels.values())
    assert configs.gpu_labels(NODES[0], 0) == {}


def test_the_guard_drops_what_leaves_the_bridge() -> None:
    assert 'iifname "fm0" oifname != "fm0" drop' in network.GUARD


def test_everything_on_disk_is_in_one_folder() -> None:
    argv = [*configs.etcd(BIN), *configs.apiserver(BIN), *configs.controller_manager(BIN), *configs.scheduler(BIN)]
    paths = [word.partition("=")[2] for word in argv if word.partition("=")[2].startswith("/")]
    assert paths and all(Path(path).is_relative_to(STATE) for path in paths)
    assert not any(point.is_relative_to(STATE) for point in MOUNT_POINTS)


def test_objects_have_their_place_in_the_api() -> None:
    paths = [path_of(manifest) for manifest in manifests.all_manifests()]
    assert len(set(paths)) == len(paths)
    assert "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns-host" in paths
    assert "/api/v1/namespaces/kube-system/services/kube-dns" in paths


def test_identities_are_what_kubernetes_expects(tmp_path: Path) -> None:
    from cryptography import x509

    pki.create(tmp_path, [Node(number=1)])
    certificate = x509.load_pem_x509_certificate((tmp_path / "node1.crt").read_bytes())
    assert certificate.subject.rfc4514_string() == "CN=system:node:node1,O=system:nodes"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.99.0.1"]
    assert (tmp_path / "admin.key").stat().st_mode & 0o077 == 0
    kubeconfig = json.loads((tmp_path / "admin.kubeconfig").read_text())
    assert kubeconfig["clusters"][0]["cluster"]["server"] == "https://10.99.0.254:6443"
    issued = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(issued)
