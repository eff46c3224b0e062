"""Devices, links, hosts and clusters that jobs run on; the bundled machines; and the names that people write for them.

Values only: nothing here knows of jobs. `parse_cluster` makes a `Cluster` of a name or a file; `docs/clusters.md` is its page.
"""

from dpro_search.cluster.cluster import Cluster as Cluster
from dpro_search.cluster.cluster import HostGroup as HostGroup
from dpro_search.cluster.cluster import each_host as each_host
from dpro_search.cluster.device import Device as Device
from dpro_search.cluster.device import Peaks as Peaks
from dpro_search.cluster.device import Provenance as Provenance
from dpro_search.cluster.device import Sample as Sample
from dpro_search.cluster.generic import pcie_hosts as pcie_hosts
from dpro_search.cluster.generic import with_device as with_device
from dpro_search.cluster.host import Host as Host
from dpro_search.cluster.host import Nics as Nics
from dpro_search.cluster.link import LEVELS as LEVELS
from dpro_search.cluster.link import Link as Link
from dpro_search.cluster.link import Torus as Torus
from dpro_search.cluster.names import known_names as known_names
from dpro_search.cluster.names import parse_cluster as parse_cluster
from dpro_search.cluster.written import device_toml as device_toml
from dpro_search.cluster.written import to_toml as to_toml
