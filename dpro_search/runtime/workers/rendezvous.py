"""Horovod's rendezvous server alone: `python rendezvous.py HOST:SLOTS,... RANKS` prints its port and serves until stdin closes."""

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

if __name__ == "__main__":
    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(sys.argv[1]), int(sys.argv[2])))
    print(port, flush=True)
    sys.stdin.read()
    server.stop()
