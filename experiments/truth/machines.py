"""`cluster_of`: the hosts of a row."""

from __future__ import annotations

import re
from typing import Literal

from msgspec.structs import replace

from dpro_search.cluster import Cluster, Device, bundled, parse_cluster, pcie_hosts, with_device
from dpro_search.errors import InputError
from experiments.truth.megatron_tests import is_test
from experiments.truth.rows import Row

# Cards and devices for which no machine is bundled: name of a GPU in a row -> bundled device, generation of PCIe.
CARDS: tuple[tuple[str, str, Literal[3, 4, 5]], ...] = (
    (r"h200.*nvl", "h200-nvl", 5),
    (r"h100.*pcie", "h100-pcie", 5),
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100-pcie-40gb", 4),
    (r"a100.*pcie", "a100-pcie-80gb", 4),
    (r"v100.*pcie", "v100-pcie-32gb", 3),
    (r"p100", "p100-pcie-16gb", 3),
    (r"a30\b", "a30", 4),
    (r"a40\b", "a40", 4),
    (r"a6000", "rtx-a6000", 4),
    (r"a10g\b", "a10g", 4),
    (r"a10\b", "a10", 4),
    (r"6000 ada", "rtx-6000-ada", 4),
    (r"l40\b", "l40", 4),
    (r"l4\b", "l4", 4),
    (r"t4\b", "t4", 3),
    (r"rtx pro 6000", "rtx-pro-6000-server", 5),
    (r"4090", "rtx-4090", 4),
    (r"3090", "rtx-3090", 4),
    (r"2080", "rtx-2080-ti", 3),
    (r"titan rtx", "titan-rtx", 3),
    (r"titan ?xp", "titan-xp", 3),
    (r"mi100", "mi100", 4),
    (r"mi210", "mi210", 4),
    (r"mi250", "mi250-gcd", 4),
)
MACHINES = (  # name of a GPU in a row -> bundled machine; the first that is found in the row's name counts
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"b300", "hgx-b300"),
    (r"b200", "hgx-b200"),
    (r"h200", "hgx-h200"),
    (r"h800", "hgx-h800"),
    (r"h100", "hgx-h100"),
    (r"a800", "hgx-a800"),
    (r"a100(?!.*40/80).*40", "dgx-a100-40"),
    (r"a100", "dgx-a100-80"),
    (r"v100-(sxm2-)?16", "dgx-1-v100"),
    (r"v100", "jean-zay-v100"),
    (r"mi355x", "mi355x-platform"),
    (r"mi350x", "mi350x-platform"),
    (r"mi3(00|25)x", "mi300x-platform"),
    (r"l40s", "l40s-pcie-8"),
)
NVLINKS_OF_A100 = 12
LEAST_POWER_W = 350.0  # The power of H100's cards for PCIe slots (data sheet).
GPUS = {r"v100-(sxm2-)?16": "v100-sxm2-16gb", "mi325x": "mi325x"}  # In such a machine another device than its own.


def machine_of(row: Row) -> str:
    """The machine or card of a row; "" if it is not known."""
    text = gpu_of(row)
    found = next((card for pattern, card, _ in CARDS if re.search(pattern, text)), None)
    return found or next((machine for pattern, machine in MACHINES if re.search(pattern, text)), "")


def gpu_of(row: Row) -> str:
    """The GPU of a row; where it is not given, that of the system that the notes name."""
    named = re.search(r"dgx-?[12][^)\"]*|dgx a100[^)\"]*", row.text("notes"))
    system = named.group() if named else ""
    if not row.text("gpu"):
        return ("a100 " if "a100" in system else "v100 ") + system if system else ""
    return row.text("gpu") + (f" of {system}" if "v100" in row.text("gpu") else "")


def devices_of(row: Row) -> int:
    """Megatron-LM's tests run on one host of 8 where they do not say it, of 4 where their name says so."""
    named = re.search(r"1n(\d)g", row.text("model"))
    host = int(named.group(1)) if named else 4 if "1node" in row.text("model") and "gb200" in row.text("gpu") else 8
    return row.whole("n_gpus", host if is_test(row) else 1)


def cluster_of(row: Row) -> Cluster:
    """Bundled machines of the row's GPU, or servers with PCIe slots where none is bundled."""
    text, devices = gpu_of(row), devices_of(row)
    per_host = row.whole("gpus_per_node", 16 if "dgx-2" in text else 8)
    card = next(((name, generation) for pattern, name, generation in CARDS if re.search(pattern, text)), None)
    if card is not None:
        each = _divisor(devices, per_host)
        return pcie_hosts(_device(card[0]), devices=each, hosts=devices // each, generation=card[1])
    name = next((machine for pattern, machine in MACHINES if re.search(pattern, text)), None)
    if name is None:
        raise InputError(f"no bundled machine or device has the GPU {row.values['gpu'] or '(none)'}")
    if "efa" in row.text("inter_net") and name == "hgx-h100":
        name = "p5.48xlarge"
    if "v100" in text and "dgx" in text:
        name = "dgx-2" if "dgx-2" in text else "dgx-1-v100"
    cluster = _with_links(parse_cluster(f"{max(-(-devices // per_host), 1)}x{name}"), row)
    other = next((device for pattern, device in GPUS.items() if re.search(pattern, text)), None)
    if other:
        return with_device(cluster, _device(other))
    return with_device(cluster, _variant(cluster.groups[0].host.device, text)) if "variant" in text else cluster


def _variant(device: Device, text: str) -> Device:
    """A device with the memory that a row gives; one of "lower TDP" between those of the card for PCIe slots and of the module."""
    size, rate = re.search(r"(\d+) ?gb", text), re.search(r"([\d.]+) ?tb/s", text)
    if size and rate:
        device = replace(device, memory_bytes=int(size[1]) * 2**30, memory_bytes_per_s=float(rate[1]) * 1e12)
    if "lower tdp" in text and device.power_w:
        device = replace(device, power_w=(device.power_w + LEAST_POWER_W) / 2)
    return device


def _with_links(cluster: Cluster, row: Row) -> Cluster:
    """With the NVLinks of a device and the network cards of a host that a row gives; where it gives none, the machine's own."""
    (group,) = cluster.groups
    host = group.host
    links, cards = re.search(r"\b(\d+) nvlink inter-gpu", row.text("intra_link")), _cards(row, host.devices)
    if links and host.links[0].rate_bps is not None:
        share = int(links[1]) / NVLINKS_OF_A100
        host = replace(host, links=(replace(host.links[0], rate_bps=share * host.links[0].rate_bps), *host.links[1:]))
    if cards and host.nics is not None and group.count > 1:
        count, rate_bps = cards
        if host.devices % count and count % host.devices:  # shared by all, as no device has its own part of them
            count, rate_bps = 1, count * rate_bps
        host = replace(host, nics=replace(host.nics, count=count, link=replace(host.nics.link, rate_bps=rate_bps)))
    return replace(cluster, groups=(replace(group, host=host),))


def _cards(row: Row, devices: int) -> tuple[int, float] | None:
    """Network cards of a host for the job's traffic, and bits a second of each; None where a row does not say both."""
    text = row.text("inter_net")
    if each := re.search(r"(\d+) ?gb(?:ps|/s) per gpu", text):
        return devices, 1e9 * float(each[1])
    if whole := re.match(r"(\d+) ?gbps (?:per node|roce)", text):
        return devices, 1e9 * float(whole[1]) / devices
    parts = [part for part in re.split(r"[,;+]", text) if not re.search("storage|management", part) or "compute" in part]
    counted = [match for part in parts if (match := re.search(r"(\d+) ?x .*?(\d+) ?gb(?:it|ps|/s)", part))]
    rated = [(int(match[1]), 1e9 * float(match[2])) for match in counted if match[1] != "0"]
    return max(rated, key=lambda card: card[0] * card[1], default=None)


def _device(name: str) -> Device:
    return bundled.device(name)


def _divisor(devices: int, most: int) -> int:
    """Of equal hosts, the devices that each has: as many as fit, so that all hosts are full."""
    return next(each for each in range(min(devices, most), 0, -1) if devices % each == 0)
