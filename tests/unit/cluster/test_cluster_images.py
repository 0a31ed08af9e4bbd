"""What goes into the images, when they are built again, and how layers reach a node."""

import importlib.util
import json
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from foremoe_cluster import buildah, images, imagestore, oci, programs
from foremoe_cluster.baseimage import slim
from foremoe_cluster.images import Wheels

ROOT = Path(__file__).parents[3]


def load_requirements() -> ModuleType:
    path = ROOT / "cluster/foremoe_cluster/files/requirements.py"
    spec = importlib.util.spec_from_file_location("requirements", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROJECT = {
    "project": {
        "dependencies": ["rich>=14"],
        "optional-dependencies": {"operator": ["kopf", "Typing_Extensions>4"], "worker": ["torch==2"], "dev": ["ruff"]},
    }
}


def test_an_image_gets_its_extra_and_no_other() -> None:
    module = load_requirements()
    assert module.requirements(PROJECT, "operator") == ["kopf", "rich>=14", "Typing_Extensions>4"]


def test_pins_of_other_extras_do_not_matter() -> None:
    pins = ["# a comment", "", "kopf==1", "ruff==0.1", "torch==2", "typing-extensions==4.1", "urllib3==2"]
    relevant = load_requirements().relevant_constraints(pins, PROJECT, "operator")
    assert relevant == ["kopf==1", "typing-extensions==4.1", "urllib3==2"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("operator/foremoe_operator/a.py", "worker/foremoe/b.py", "Dockerfile", "pyproject.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_the_hash_follows_the_inputs_only(checkout: Path) -> None:
    none = Wheels(folders=())
    first = images.inputs_hash(checkout, "base", none)
    (checkout / "docs").mkdir()
    (checkout / "docs/page.md").write_text("x")
    cache = checkout / "worker/foremoe/__pycache__"
    cache.mkdir()
    (cache / "b.cpython-311.pyc").write_bytes(b"x")
    assert images.inputs_hash(checkout, "base", none) == first
    assert images.inputs_hash(checkout, "other base", none) != first
    (checkout / "worker/foremoe/b.py").write_text("changed")
    assert images.inputs_hash(checkout, "base", none) != first


def test_local_wheels_change_the_hash(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("wheels")
    before = images.inputs_hash(checkout, "base", Wheels(folders=(folder,)))
    (folder / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert images.inputs_hash(checkout, "base", Wheels(folders=(folder,))) != before


def test_find_links_are_mapped_into_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} https://wheels.example/cpu")
    wheels = Wheels.from_environment()
    assert wheels.find_links() == ["/wheels/0", "https://wheels.example/cpu"]
    listed = "global.index-url='https://index.example/simple'\nglobal.cert='/etc/ca.crt'\nglobal.quiet='1'\n"
    assert images.pip_config(listed, wheels).splitlines() == [
        "[global]",
        "index-url = https://index.example/simple",
        "cert = /etc/ca.crt",
        "find-links = /wheels/0 https://wheels.example/cpu",
    ]


def test_used_images_are_read_from_the_build_output() -> None:
    output = ["STEP 1/2: FROM x\n", "--> Using cache " + "a" * 64 + "\n", "--> 0123456789a\n", "--> no id\n"]
    assert buildah.used_images(output) == {"a" * 64, "0123456789a"}


def test_chain_ids_follow_the_specification() -> None:
    first, second = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    chain = oci.chain_ids([first, second])
    assert chain == [first, oci.digest_of(f"{first} {second}".encode())]


def test_an_archive_may_leave_layers_out(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"program")
    whole = oci.layer_of({"pause": program})
    assert whole == oci.layer_of({"pause": program}), "the same bytes every time"
    missing = oci.Layer("sha256:" + "3" * 64, 99)
    config = oci.image_config([whole, missing], ["/pause"])
    oci.write_archive(tmp_path / "out.tar", reference="localhost/x:1", config=config, layers=[whole, missing])
    with tarfile.open(tmp_path / "out.tar") as tar:
        names = tar.getnames()
        index = json.loads(tar.extractfile("index.json").read())  # type: ignore[union-attr]
        entry = index["manifests"][0]
        manifest = json.loads(tar.extractfile("blobs/" + entry["digest"].replace(":", "/")).read())  # type: ignore[union-attr]
    assert entry["annotations"]["io.containerd.image.name"] == "localhost/x:1"
    assert [layer["digest"] for layer in manifest["layers"]] == [whole.digest, missing.digest]
    assert "blobs/" + whole.digest.replace(":", "/") in names
    assert "blobs/" + missing.digest.replace(":", "/") not in names


def test_the_folder_of_a_snapshot_is_found() -> None:
    first = [{"Type": "bind", "Source": "/s/1/fs", "Options": ["rw", "rbind"]}]
    later = [
        {
            "Type": "overlay",
            "Source": "overlay",
            "Options": ["workdir=/s/2/work", "upperdir=/s/2/fs", "lowerdir=/s/1/fs"],
        }
    ]
    assert imagestore.upper_folder(json.dumps(first)) == Path("/s/1/fs")
    assert imagestore.upper_folder(json.dumps(later)) == Path("/s/2/fs")


def test_only_images_without_a_name_are_superseded() -> None:
    listed = (
        "REF TYPE DIGEST SIZE\n"
        "localhost/a:dev application/x sha256:111 1 MiB\n"
        "sha256:config-of-a application/x sha256:111 1 MiB\n"
        "sha256:config-of-old-a application/x sha256:222 1 MiB\n"
    )
    assert imagestore.superseded(listed) == ["sha256:config-of-old-a"]


def test_slimming_empties_folders_and_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "usr/share/doc/python3").mkdir(parents=True)
    (tmp_path / "usr/share/doc/link").symlink_to("python3")
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "usr/bin/python3").touch()
    slim(tmp_path)
    assert not list((tmp_path / "usr/share/doc").iterdir())
    assert (tmp_path / "usr/bin/python3").exists()


def test_programs_are_kept_by_pins_sources_and_compiler(tmp_path: Path) -> None:
    (tmp_path / "cmd/etcd").mkdir(parents=True)
    for name in ("go.mod", "go.sum", "cmd/etcd/main.go"):
        (tmp_path / name).write_text(name)
    first = programs.fingerprint(tmp_path, "go1.26.8")
    assert programs.fingerprint(tmp_path, "go1.26.8") == first
    assert programs.fingerprint(tmp_path, "go1.27.0") != first
    (tmp_path / "cmd/etcd/main.go").write_text("changed")
    assert programs.fingerprint(tmp_path, "go1.26.8") != first


@pytest.mark.parametrize(
    ("version", "wanted", "enough"),
    [
        ("go1.26.8", "1.26.8", True),
        ("go1.27.0", "1.26.8", True),
        ("go1.26.7", "1.26.8", False),
        ("go1.9", "1.26", False),
    ],
)
def test_go_versions_are_compared_as_numbers(version: str, wanted: str, enough: bool) -> None:
    assert programs.new_enough(version, wanted) is enough
