"""Jobs on a GPU, measured and profiled, and predictions beside that.

    python -m experiments.validation.gpu_jobs record OUT [--seconds 170]       # on the machine with the GPU; needs PyTorch alone
    python -m experiments.validation.gpu_jobs score OUT [--captured DIR]       # anywhere; prints tables

With --device cpu --small `record` runs at tiny sizes without a GPU, to try the program.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["record", "rank", "score"], help="rank: one of two ranks, as record starts them")
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--captured", type=Path, metavar="DIR", help="what dpro-search capture made of each job, DIR/JOB/job.toml")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    if options.verb == "record":
        from experiments.validation.gpu_jobs.record import Recorder

        Recorder(options.folder, options.seconds, options.device, small=options.small).run()
    elif options.verb == "rank":
        from experiments.validation.gpu_jobs.ranks import run_rank

        run_rank(options.folder, options.rank, options.seconds, options.device, small=options.small)
    else:
        from experiments.validation.gpu_jobs.score import main as score

        score(options.folder, options.captured)


if __name__ == "__main__":
    main()
