"""Images from buildah's storage into the nodes, without copying a byte of their layers.

Both keep a layer as a folder of files, in the same overlay form, and neither ever changes one. So a
layer becomes a snapshot of containerd by hard links: prepare an empty snapshot, link the files in,
commit it under the layer's chain id. Then the image itself is imported as a manifest and a
configuration; containerd finds all snapshots there and needs no layer content. A changed image
costs its new layers only. (docs/decisions/002)
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foremoe_cluster import configs, processes
from foremoe_cluster.buildah import BuiltImage, BuiltLayer
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.leftovers import IMAGE_BUILD_ROLE
from foremoe_cluster.oci import Layer, chain_ids, write_archive
from foremoe_cluster.settings import BUILD, Node
from foremoe_cluster.shell import run, start, tail, wait_for

KEY = "foremoe-link"
LOG = "containerd.log"


def load(image: BuiltImage, nodes: Sequence[Node], bin_: Path) -> None:
    """Make the image available on all nodes, running or not."""
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        archive = Path(scratch) / "image.tar"
        layers = [Layer(layer.diff_id, layer.size) for layer in image.layers]
        write_archive(archive, reference=image.name, config=image.config, layers=layers)
        with ThreadPoolExecutor(len(nodes)) as pool:
            for done in [pool.submit(_load_into, node, image, archive, bin_) for node in nodes]:
                done.result()


def upper_folder(mounts: str) -> Path:
    """Where to put a snapshot's files, from `ctr snapshots prepare --mounts`."""
    mount = json.loads(mounts)[0]
    for option in mount.get("Options") or []:
        if option.startswith("upperdir="):
            return Path(option.removeprefix("upperdir="))
    return Path(mount["Source"])


def _load_into(node: Node, image: BuiltImage, archive: Path, bin_: Path) -> None:
    with _containerd(node, bin_) as socket:

        def ctr(*words: str | Path) -> str:
            return run(bin_ / "ctr", "-a", socket, "-n", "k8s.io", *words)

        present = {line.split()[0] for line in ctr("snapshots", "ls").splitlines()[1:] if line.strip()}
        for key in present:
            if key.startswith(KEY):  # of a run that was killed
                ctr("snapshots", "rm", key)
        chain = chain_ids([layer.diff_id for layer in image.layers])
        for index, (layer, name) in enumerate(zip(image.layers, chain, strict=True)):
            if name not in present:
                key = f"{KEY}-{os.getpid()}-{index}"
                mounts = ctr("snapshots", "prepare", "--mounts", key, *chain[max(0, index - 1) : index])
                _link(layer, upper_folder(mounts))
                ctr("snapshots", "commit", name, key)
        ctr("images", "import", archive)
        for name in chain:  # `ctr` protects what it commits from garbage collection; from now on the image does
            ctr("snapshots", "label", name, "containerd.io/gc.root=")
        for reference in superseded(ctr("images", "ls")):
            ctr("images", "rm", reference)


def superseded(listed: str) -> list[str]:
    """Of `ctr images ls`: references by digest (the CRI plugin adds them) to images that have lost their name."""
    rows = [line.split()[:3] for line in listed.splitlines()[1:] if line.strip()]
    named = {digest for reference, _, digest in rows if not reference.startswith("sha256:")}
    return [reference for reference, _, digest in rows if reference.startswith("sha256:") and digest not in named]


def _link(layer: BuiltLayer, target: Path) -> None:
    target.rmdir()
    run("cp", "-a", "--link", "--no-target-directory", layer.folder, target, timeout=600)


@contextlib.contextmanager
def _containerd(node: Node, bin_: Path) -> Iterator[Path]:
    """The node's containerd; one of our own for the time being where the node does not run."""
    if node.name in processes.roles():
        wait_for(f"{node.name}: containerd", node.socket.exists, seconds=30)
        yield node.socket
        return
    folder = BUILD / "containerd" / node.name
    folder.mkdir(parents=True, exist_ok=True)
    node.images.mkdir(parents=True, exist_ok=True)
    socket = folder / "containerd.sock"
    config = folder / "containerd.toml"
    config.write_text(configs.image_containerd(node, folder))
    process = start(IMAGE_BUILD_ROLE, [bin_ / "containerd", "-c", config], log=folder / LOG)
    try:
        wait_for(f"{node.name}: containerd", lambda: _answers(bin_, folder, process), seconds=60)
        yield socket
    finally:
        process.terminate()
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(bin_: Path, folder: Path, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise ClusterError(f"containerd ended with code {process.returncode}:\n{tail(folder / LOG)}")
    socket = folder / "containerd.sock"
    return (
        socket.exists() and not subprocess.run([bin_ / "ctr", "-a", socket, "version"], capture_output=True).returncode
    )
