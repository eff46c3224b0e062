"""TPUs: names of devices and topologies, their shapes and links, and what is refused."""

from pathlib import Path

import msgspec
import pytest

from dpro_search.cluster import Cluster, Torus, bundled, parse_cluster, to_toml
from dpro_search.cluster.files import load_cluster
from dpro_search.cluster.tpu_topologies import generations
from dpro_search.costmodel.collectives.nccl import Placement, collective_us
from dpro_search.costmodel.devices.profile import DeviceProfile
from dpro_search.errors import InputError
from dpro_search.parallel.file.description import described
from dpro_search.parallel.file.scenario import in_scenario
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.scenario import Scenario
from tests.every_case import every_case

TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")


@every_case(
    ("written", "device"),
    [
        ("v5p", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),  # as JAX calls it
        ("TPU v5 lite", "tpu-v5e"),
        ("v5litepod", "tpu-v5e"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU v6e (Trillium)", "tpu-v6e"),
        ("trillium", "tpu-v6e"),
        ("ironwood", "tpu-v7x"),
        ("TPU7x", "tpu-v7x"),
        ("tpu_v4", "tpu-v4"),
    ],
)
def test_a_tpu_is_found_by_the_names_that_people_and_drivers_use(written: str, device: str):
    assert parse_cluster(written).devices == (bundled.device(device),)


@every_case(
    ("name", "bf16_tflops", "memory_gib", "memory_gb_per_s", "cores"),
    [
        ("tpu-v4", 275, 32, 1200, 2),
        ("tpu-v5e", 197, 16, 819, 1),
        ("tpu-v5p", 459, 95, 2765, 2),
        ("tpu-v6e", 918, 32, 1638, 1),
        ("tpu-v7x", 2307, 192, 7380, 2),
    ],
)
def test_values_of_a_chip_are_those_of_the_documentation(
    name: str, bf16_tflops: float, memory_gib: int, memory_gb_per_s: float, cores: int
):
    device = bundled.device(name)
    assert (device.kind, device.cores, device.memory_bytes) == ("tpu", cores, memory_gib * 2**30)
    assert device.peak_flops_per_s("bf16") == bf16_tflops * 1e12
    assert device.memory_bytes_per_s == memory_gb_per_s * 1e9


@every_case(("name", "both_ways_gb_per_s"), [("tpu-v5e", 400), ("tpu-v5p", 1200), ("tpu-v6e", 800), ("tpu-v7x", 1200)])
def test_the_links_of_a_chip_carry_what_the_documentation_states(name: str, both_ways_gb_per_s: float):
    generation = generations()[name]
    links = 2 * generation.axes
    assert 2 * links * generation.link_bytes_per_us == both_ways_gb_per_s * 1e3


@every_case("name", TPUS)
def test_a_value_without_a_document_says_how_it_was_found(name: str):
    device = bundled.device(name)
    assert device.provenance.of("clock").startswith(("derived: ", "estimated: "))
    assert "JAX" in device.provenance.of("vector_memory")
    cluster = parse_cluster(f"{generations()[name].names}:2x2")
    for key in ("torus.link_rate", "torus.hop", "nic.rate", "nic.latency", "pcie.rate"):
        assert cluster.provenance.of(key) != cluster.provenance.source, key


@every_case(
    ("name", "shape", "wraps"),
    [
        ("v6e:16x16", (16, 16), (True, True)),
        ("v6e:4x4", (4, 4), (False, False)),
        ("v5e:8x16", (8, 16), (False, True)),
        ("v5p:4x4x8", (4, 4, 8), (True, True, True)),
        ("v5p:2x2x4", (2, 2, 4), (False, False, False)),  # less than a cube: no optical switches
        ("v4:4x4x4", (4, 4, 4), (True, True, True)),
        ("tpu7x:2x2x1", (2, 2, 1), (False, False, False)),
    ],
)
def test_an_axis_wraps_around_where_the_hardware_closes_it(name: str, shape: tuple[int, ...], wraps: tuple[bool, ...]):
    torus = parse_cluster(name).torus
    assert torus is not None
    assert (torus.shape, torus.wraps) == (shape, wraps)


@every_case(
    ("cloud", "jax"),
    [
        ("v5p-1024", "v5p:8x8x8"),  # TensorCores
        ("v4-128", "v4:4x4x4"),
        ("tpu7x-8", "tpu7x:2x2x1"),
        ("v6e-256", "v6e:16x16"),  # chips
        ("v5litepod-16", "v5e:4x4"),
        ("2xv5p-16", "2 x v5p:2x2x2"),
        ("ironwood:2x2x2", "tpu7x:2x2x2"),
        ("TPU v6e=4x4", "v6e:4x4"),
        ("v5p:2x2", "v5p:2x2x1"),
        ("v5e:4x4x1", "v5e:4x4"),
        ("v5p:4x4x8_untwisted", "v5p:4x4x8"),
    ],
)
def test_clouds_names_are_topologies(cloud: str, jax: str):
    assert parse_cluster(cloud) == parse_cluster(jax)


def test_a_count_before_a_topology_is_of_slices():
    cluster = parse_cluster("2x v6e:16x16")
    assert cluster.torus is not None
    assert (cluster.torus.slices, cluster.torus.chips, cluster.ranks, cluster.hosts) == (2, 256, 512, 128)


def test_a_host_has_four_chips_and_their_part_of_the_network():
    assert parse_cluster("v6e:4x4").rate_bps == 4 * 100e9
    assert parse_cluster("v5p:4x4x4@100gbit").rate_bps == 100e9


def test_chips_are_listed_host_by_host_as_libtpu_does():
    """The first devices of jax.experimental.topologies.get_topology_desc("v6e:4x4") in libtpu 0.0.42."""
    torus = parse_cluster("v6e:4x4").torus
    assert torus is not None
    listed = torus.coordinates()
    assert listed[:9] == ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0), (3, 0, 0), (2, 1, 0), (3, 1, 0), (0, 2, 0))
    assert len(set(listed)) == 16


@every_case(
    ("name", "message"),
    [
        ("v6e:1x1", "one chip is written v6e"),
        ("v6e:5x5", "the first two axes are even"),
        ("v6e:32x32", "a pod of v6e has 256 chips"),
        ("v6e:4x4x4", "a torus of two axes"),
        ("v5p:4x", "write the chips along each axis, like v5p:4x4x4"),
        ("v5p:0x2x2", "the first two axes are even"),
        ("v5p:4x4x8_twisted", "twisted tori have no model"),
        ("v9:2x2", "no TPU is called 'v9'; known are v4, v5e, v5p, v6e, tpu7x"),
        ("v5p-1000", "no slice has 1000 TensorCores; use v5p-8, v5p-16"),
        ("v4-12288", "no slice has 12288 TensorCores"),
        ("v6e-512", "no slice has 512 chips"),
        ("4xv5p", "name the topology that joins the chips, like v5p:2x2x1"),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_in_one_line(name: str, message: str):
    with pytest.raises(InputError) as caught:
        parse_cluster(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@every_case("name", ["v6e", "v5p:4x4x8", "2x v6e:16x16", "tpu7x:2x2x2"])
def test_a_cluster_of_tpus_comes_back_from_toml_and_json(name: str, tmp_path: Path):
    cluster = parse_cluster(name)
    (tmp_path / "it.toml").write_text(to_toml(cluster))
    assert load_cluster(tmp_path / "it.toml", bundled.find) == cluster
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


def test_a_file_may_describe_a_torus_of_its_own(tmp_path: Path):
    text = to_toml(parse_cluster("v5e:4x4")).replace("shape = [4, 4]", "shape = [4, 6]")
    (tmp_path / "it.toml").write_text(text)
    with pytest.raises(InputError, match="torus: 1 x 4x6 chips are not the 16 devices of the hosts"):
        parse_cluster(str(tmp_path / "it.toml"))


@every_case(
    ("values", "message"),
    [
        ({"shape": (4,)}, "two or three numbers"),
        ({"wraps": (True,)}, "for each of 2 axes"),
        ({"shape": (3, 4)}, "the first two axes must be even"),
        ({"slices": 0}, "must be at least 1"),
        ({"link_bytes_per_us": 0.0}, "must be above 0"),
    ],
)
def test_an_impossible_torus_is_refused(values: dict[str, object], message: str):
    usual: dict[str, object] = {"shape": (4, 4), "wraps": (False, False), "link_bytes_per_us": 1e5, "hop_us": 1.0}
    with pytest.raises(InputError, match=message):
        Torus(**{**usual, **values})  # type: ignore[arg-type]


def test_what_holds_for_gpus_never_answers_for_a_torus():
    cluster = parse_cluster("v5p:2x2x2")
    asked = (
        lambda: cluster.bandwidth_bytes_per_us(range(4)),
        lambda: cluster.level_between(0, 1),
        lambda: cluster.latency_us(range(8)),
        lambda: cluster.with_hosts(4),
        lambda: collective_us("all_reduce", 1e6, cluster, Placement(ranks_per_node=4)),
        lambda: collective_us("all_reduce", 1e6, parse_cluster("v5p"), Placement(ranks_per_node=1)),
        lambda: DeviceProfile(device=bundled.device("tpu-v5p")),
    )
    for ask in asked:
        with pytest.raises(InputError, match=r"TPU|torus"):
            ask()


@every_case("cluster", ["v5p:4x4x4", "v6e-256", "2x tpu7x:2x2x1", "v5p"])
def test_a_described_job_says_in_one_line_that_tpus_have_no_cost_model(cluster: str, tmp_path: Path):
    path = tmp_path / "job.toml"
    text = 'model = "llama3-8b"\ncluster = "{}"\nglobal_batch = 256\nsequence = 4096\nprecision = "bf16"\n'
    text += 'framework = "megatron-core"\n'
    path.write_text(text.format(cluster))
    with pytest.raises(InputError, match=r"job.toml:2: cluster: .* has TPUs: described jobs have no cost model for TPUs yet$"):
        described(path)
    path.write_text(text.format("8xhgx-h100"))
    description = described(path)
    assert description is not None
    with pytest.raises(InputError, match=r"has TPUs: described jobs have no cost model for TPUs yet$"):
        in_scenario(description, Scenario().on(cluster))


@every_case("cluster", ["v5p:4x4x4", "v5p"])
def test_a_recorded_job_is_not_predicted_on_tpus_by_another_device(cluster: str):
    change = Scenario().on(cluster).cluster
    for ask in (lambda: change.on_gpus, lambda: change.applied(ClusterSpec(cores=(0,)))):
        with pytest.raises(InputError, match=r"has TPUs: this kind of job has no cost model for TPUs yet$"):
            ask()
