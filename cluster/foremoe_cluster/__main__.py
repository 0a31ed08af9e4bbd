"""Command line of the embedded cluster; `make cluster-up` and its neighbours call it."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foremoe_cluster import lifecycle, packages, processes, programs, prove
from foremoe_cluster.api import Api
from foremoe_cluster.demo import demo as run_demo
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.images import build_and_load
from foremoe_cluster.progress import console, errors
from foremoe_cluster.settings import KUBECONFIG, Settings

app = typer.Typer(
    name="foremoe_cluster",
    help="A real Kubernetes cluster on this machine (Debian, root), without Docker and without a registry.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

NodesOption = Annotated[
    int | None, typer.Option("--nodes", help="Number of nodes (FOREMOE_CLUSTER_NODES). [default: 2]")
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", help="Stand-in GPUs per node (FOREMOE_CLUSTER_GPUS). [default: 8]")
]


@app.command()
def up(nodes: NodesOption = None, gpus: GpusOption = None) -> None:
    """Bring the cluster up; a healthy one is left alone, anything else is made anew."""
    lifecycle.up(Settings.from_environment(nodes=nodes, gpus=gpus))


@app.command()
def down(purge: Annotated[bool, typer.Option("--purge", help="Remove the kept images as well.")] = False) -> None:
    """Remove the cluster and everything it left; images are kept for next time."""
    lifecycle.down(purge=purge)


@app.command()
def status() -> None:
    """Show programs, nodes and GPUs; the exit code is 0 only where all are well."""
    roles = processes.roles()
    with Api() as api:
        nodes, ready = api.items("/api/v1/nodes"), lifecycle.ready_nodes(api)
    table = Table("node", "state", "pid", "GPUs", box=None)
    for node in nodes:
        name = node["metadata"]["name"]
        state = "Ready" if name in ready else "NotReady"
        gpus = node["status"].get("allocatable", {}).get("nvidia.com/gpu", "0")
        table.add_row(name, state, str(roles.get(name, "-")), gpus)
    console.print(table)
    missing = [role for role in lifecycle.HOST_ROLES if role not in roles]
    for role in lifecycle.HOST_ROLES:
        console.print(f"{role:<24} {roles.get(role, 'not running')}")
    if missing or not nodes or len(ready) < len(nodes):
        raise typer.Exit(1)


@app.command()
def kubeconfig() -> None:
    """Print the path of the kubeconfig."""
    if not KUBECONFIG.exists():
        raise ClusterError("no cluster is up on this machine: start it with `make cluster-up`")
    print(KUBECONFIG)


@app.command()
def images(nodes: NodesOption = None) -> None:
    """Build the operator and worker images if anything in them changed, and give them to the nodes."""
    build_and_load(Settings.from_environment(nodes=nodes or lifecycle.node_count()))


@app.command()
def demo(
    kubeconfig: Annotated[Path | None, typer.Option(help="Use this cluster instead of the embedded one.")] = None,
    image: Annotated[str | None, typer.Option(help="Worker image that its nodes can pull.")] = None,
    operator_image: Annotated[str | None, typer.Option(help="Operator image that its nodes can pull.")] = None,
) -> None:
    """From nothing to a finished training job: cluster, images, operator, model and data, job."""
    run_demo(kubeconfig=kubeconfig, image=image, operator_image=operator_image)


@app.command("packages")
def install_packages(
    with_browser: Annotated[bool, typer.Option("--with-browser", help="Also chromium, for the report's test.")] = False,
) -> None:
    """Install the Debian packages that cluster, images and tests need, where they are missing."""
    packages.ensure(packages.RUNNING | packages.BUILDING_PROGRAMS | packages.BUILDING_IMAGES)
    if with_browser:
        packages.ensure(packages.BROWSER)


@app.command()
def prove_clean(
    nodes: NodesOption = None,
    kill: Annotated[bool, typer.Option(help="Also kill `up` halfway, and all processes of a running cluster.")] = True,
) -> None:
    """Prove that nothing is left behind: compare the machine before and after. Removes a running cluster."""
    prove.prove(Settings.from_environment(nodes=nodes), kill=kill)


@app.command()
def build() -> None:
    """Build the server programs, if they are not in the cache, and print their folder."""
    print(programs.binaries())


def main() -> None:
    """Run the command line; known errors are one message, not a traceback."""
    try:
        app()
    except (ClusterError, ValueError) as error:
        errors.print(f"[red]error:[/] {error}", markup=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("interrupted; repeat the command, or remove everything with `make cluster-down`")
        sys.exit(130)


if __name__ == "__main__":
    main()
