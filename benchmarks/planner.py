"""The planner against its bars: balance, copies, traffic, exactness, speed, modelled time, memory.

    python benchmarks/planner.py            # everything (about half an hour on one core)
    python benchmarks/planner.py --quick    # one seed, one layer, fewer sizes
    python benchmarks/planner.py step speed # only some pieces

Loads come from the generator (fixed seeds) and from the recorded run in tests/data. Balance, copies, traffic and
exactness are exact; times of the planner are CPU times of this process (the machine may be shared) and ratios are
measured side by side in it; modelled times are called modelled. Compilation happens before anything is timed.
Results are written to benchmarks/results/planner.json and planner.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

from planner_pieces.balance import dynamic, hybrid, step
from planner_pieces.cells import Cell, keep, line
from planner_pieces.exactness import exact, homes
from planner_pieces.loads import FULL, QUICK, Scale
from planner_pieces.speed import search, speed
from planner_pieces.steps import memory, memory_child, modelled, recorded

from foremoe.planner import warm_up

PIECES: dict[str, Callable[[Scale], Iterator[Cell]]] = {
    "exact": exact, "dynamic": dynamic, "step": step, "hybrid": hybrid, "speed": speed, "search": search,
    "homes": homes, "modelled": modelled, "recorded": recorded, "memory": memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", help=f"pieces to run: {', '.join(PIECES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="one seed, one layer, fewer sizes; nothing is written")
    parser.add_argument("--memory-child", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=94, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        memory_child(options.memory_child, options.layers)
        return
    unknown = sorted(set(options.pieces) - set(PIECES))
    if unknown:
        parser.error(f"unknown pieces {unknown}")
    start = time.process_time()
    warm_up()
    print(f"kernels ready after {time.process_time() - start:.1f} s of CPU time (compiled, or loaded from the cache)\n")
    scale = QUICK if options.quick else FULL
    for name in options.pieces or PIECES:
        cells = []
        for cell in PIECES[name](scale):
            cells.append(cell)
            print(line(cell), flush=True)
        if not options.quick:
            keep(name, cells)


if __name__ == "__main__":
    main()
