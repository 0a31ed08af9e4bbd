"""Speed of the expert-parallel runtime on two ranks of this machine, all variants interleaved in one run.

    python benchmarks/ep_runtime.py

The same measurement as `foremoe bench ep`, with the sizes and the seed of the published figures; writes
benchmarks/results/ep_runtime.json. Ratios are of CPU seconds on the critical path (one thread a rank): wall time on a
machine that does other things measures the other things.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Wide enough that experts, not attention, are what a rank computes; the rest are the defaults of the command.
SIZES = ["--hidden", "512", "--rounds", "8"]
RESULT = Path(__file__).parent / "results" / "ep_runtime.json"


def main() -> int:
    RESULT.parent.mkdir(exist_ok=True)
    entry = [sys.executable, "-c", "from foremoe.cli.main import main; main()"]
    command = [*entry, "bench", "ep", "--ranks", "2", "--json", str(RESULT), *SIZES]
    # Ranks must not start threads of their own: two ranks, two cores.
    return subprocess.run([*command, *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
