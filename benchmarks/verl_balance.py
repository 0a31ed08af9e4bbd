"""What a training run's ranks computed, against what they would have computed without plans.

    python benchmarks/verl_balance.py TRACE_DIRECTORY

Reads the trace of a run with the expert-parallel engine. Per kind of pass: how many there were, in how many every
recorded token-expert pair was computed (passes that also had rows routed live are told apart), and the imbalance, max
over mean rank load, of the homes alone and as executed. All figures are counts of the run itself, none is modelled.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from foremoe.routing import TraceReader, rank_loads
from foremoe.routing.counting import imbalance


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    reader = TraceReader(parser.parse_args().trace)
    kinds: dict[str, list[tuple[bool, bool, float, float, float]]] = defaultdict(list)
    for info in reader.passes():
        record = reader.record(info)
        if record.executed_MLR is None or record.home_LE is None:
            print(f"step {record.step}, {record.name}: no executed counts; was it run by the watched engine?")
            return 1
        recorded_ML = record.load_MLSE.sum(axis=(2, 3))
        executed_MLR = np.asarray(record.executed_MLR)
        homes = imbalance(rank_loads(record.load_MLSE, record.home_LE, ranks=executed_MLR.shape[2]))
        executed = imbalance(executed_MLR)
        kinds[record.name.rstrip("0123456789_")].append(
            (
                bool((executed_MLR.sum(axis=2) >= recorded_ML).all()),
                bool((executed_MLR.sum(axis=2) > recorded_ML).any()),
                float(homes.mean()),
                float(executed.mean()),
                float(executed.max()),
            )
        )
    print(f"{'pass':14} {'passes':>6} {'complete':>8} {'with live':>9} {'homes':>6} {'executed':>8} {'worst':>6}")
    for kind, rows in kinds.items():
        complete, live, homes_mean, executed_mean, worst = zip(*rows, strict=True)
        print(
            f"{kind:14} {len(rows):6} {sum(complete):8} {sum(live):9} {np.mean(homes_mean):6.3f} "
            f"{np.mean(executed_mean):8.3f} {max(worst):6.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
