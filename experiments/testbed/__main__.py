"""Hosts on one machine with a bandwidth limit on every link; runs one command on each of them, or a distributed job over them.

    python -m experiments.testbed --hosts 2 --rate 1gbit -- ping -c 3 h1          # the command once, on host h0
    python -m experiments.testbed --hosts 2 --rate 1gbit --job -- ENV/bin/python experiments/workloads/train.py --model bert

With --job, one Horovod rank starts on every host, pinned to a core of its own (round-robin), without ssh. The command's output of
rank 0 is shown, and how many bytes crossed every link. Needs root; everything is removed at the end, also after Ctrl-C or a kill.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from dpro_search.collect.launch.horovod_gloo import run_horovod_gloo
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.errors import DproSearchError
from dpro_search.quantities import parse_rate_bps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="unlimited", help="of every link in each direction: 500mbit, 2gbit, unlimited")
    parser.add_argument("--job", action="store_true", help="start the command as one Horovod rank per host")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD...")
    options = parser.parse_args()
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    try:
        with ShapedHosts(options.hosts, parse_rate_bps(options.rate)) as hosts:
            if not options.job:
                return subprocess.run(hosts.command(0, command), check=False).returncode
            before = [hosts.sent_bytes(host) for host in range(options.hosts)]
            with tempfile.TemporaryDirectory() as folder:
                spec = JobSpec(command=command, ranks=options.hosts, cores=default_cores(options.hosts))
                run_horovod_gloo(spec, Path(folder), hosts=hosts)
                print((Path(folder) / "rank0" / "log").read_text(), end="")
            for host in range(options.hosts):
                print(f"{hosts.names[host]} sent {(hosts.sent_bytes(host) - before[host]) / 1e6:.1f} MB", file=sys.stderr)
            return 0
    except DproSearchError as error:
        print(f"testbed: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
