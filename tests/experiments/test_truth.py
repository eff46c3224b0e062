"""``experiments.truth score``: errors of predictions of published runs, and why rows are left out."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dpro_search.parallel.costs.domain import Domain
from dpro_search.parallel.memory.peak import PeakMemory, rank_memories
from dpro_search.parallel.workload import Workload
from experiments.truth import __main__ as truth
from experiments.truth.blanks import completed
from experiments.truth.contradictions import contradictions
from experiments.truth.jobs import workload_of
from experiments.truth.memory import partly_recomputed, phases_of, reported_bytes
from experiments.truth.models import model_of
from experiments.truth.orders import ordered, pairs
from experiments.truth.page import _ticks, write_page
from experiments.truth.pooling import Errors, pooled
from experiments.truth.rows import Row, publisher_of
from experiments.truth.score import Predicted, Scored, figures
from tests.in_process import called

HEAD = (
    "source,gpu,gpus_per_node,n_gpus,model,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,precision,dp,tp,pp,micro_batch,"
    "global_batch,framework,status,step_time_s,tier,memory_gb"
)
RUN = "{source},H100,8,8,llama,32,4096,32,8,14336,128256,4096,bf16,8,1,1,1,64,NeMo,{status},{seconds},A,{memory}"


def score(folder, *options):
    return called(truth, "score", folder, *options)


@pytest.fixture
def runs(tmp_path):
    rows = [
        RUN.format(source="one", status="ok", seconds=4, memory=60),
        RUN.format(source="one", status="oom", seconds="", memory=""),
        RUN.format(source="two", status="ok", seconds=8, memory="").replace("H100", "K80"),
    ]
    (tmp_path / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return tmp_path


def test_the_table_has_every_run_with_its_interval_and_what_formulas_say(runs, tmp_path):
    done = called(truth, "table", runs, "--out", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page" / "accuracy.html").read_text()
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert (run["source"], run["gpu"], run["measured"]) == ("one", "H100", 4.0)
    assert run["interval"][0] < run["predicted"] < run["interval"][1]
    assert len(run["peers"]) == len(data["peers"]) == 2
    assert "{{" not in page


def test_errors_are_given_for_each_source_and_in_all(runs):
    facts = json.loads(score(runs, "--json").stdout)
    assert (facts["all"]["rows"], facts["all"]["supported"]) == (2, 1)
    one = facts["source"]["one"]
    keys = {
        "rows",
        "supported",
        "mape_pct",
        "median_ape_pct",
        "p90_ape_pct",
        "bias_pct",
        "kendall_tau",
        "memory_rows",
        "memory_mape_pct",
        "memory_median_ape_pct",
        "memory_within_5_pct",
        "oom",
    }
    assert keys | {"seconds_per_row"} == set(one)
    assert one["mape_pct"] == abs(one["bias_pct"]) < 50


def test_calibration_is_scored_on_rows_that_it_was_not_fitted_to(tmp_path):
    """Runs that all take 1.4 times as long: the fifth says so, and the others come out nearer."""
    cold = json.loads(score(written(tmp_path, 1.0), "--json").stdout)
    error = cold["all"]["bias_pct"] / 100
    slower = [
        json.loads(score(written(tmp_path, 1.4 * (1 + error)), *options, "--json").stdout)
        for options in ((), ("--calibrated", "0"))
    ]
    assert slower[0]["all"]["mape_pct"] == pytest.approx(100 * (1 - 1 / 1.4), abs=5)
    assert slower[1]["all"]["mape_pct"] < slower[0]["all"]["mape_pct"] * 0.7  # two rows against what is assumed before
    assert slower[1]["all"]["rows"] == 8  # of ten groups


def written(folder, factor):
    """Runs of ten batch sizes, so as many groups."""
    batches = [64 + 8 * number for number in range(10)]
    rows = (
        RUN.format(source="one", status="ok", seconds=factor * batch / 16, memory="").replace(",64,NeMo", f",{batch},NeMo")
        for batch in batches
    )
    (folder / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return folder


def test_intervals_are_those_of_other_sources(tmp_path):
    rows = [
        RUN.format(source=name, status="ok", seconds=seconds, memory="") for name, seconds in (("one", 4), ("two", 4), ("three", 8))
    ]
    (tmp_path / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    facts = json.loads(score(tmp_path, "--intervals").stdout)
    assert facts["ratio"]["bound by the device"]["rows"] == 3
    assert facts["coverage_of_source_left_out"] == {"one": 1.0, "two": 1.0, "three": 0.0}


def test_intervals_of_one_source_are_one_line(runs):
    done = score(runs, "--intervals")
    assert (done.returncode, done.stdout) == (2, "")
    assert "at least two sources" in done.stderr


def test_rows_that_are_left_out_are_counted_with_the_reason(runs):
    facts = json.loads(score(runs, "--json").stdout)
    assert facts["unsupported"] == [{"source": "two", "reason": "no bundled machine or device has the GPU K80", "rows": 1}]


def test_a_folder_without_runs_is_one_line(tmp_path):
    done = score(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CSV files of runs" in done.stderr


def test_rows_that_may_have_recomputed_hold_what_fits() -> None:
    def held(activations: float) -> PeakMemory:
        return PeakMemory(
            weights_bytes=10.0,
            gradients_bytes=0.0,
            optimizer_bytes=0.0,
            activations_bytes=activations,
            logits_bytes=0.0,
            gathered_bytes=0.0,
        )

    for limit, expected in ((200.0, 90.0), (65.0, 50.0), (5.0, 10.0)):  # all, half of the layers, none
        (row_with_memory,) = partly_recomputed([held(90.0)], [held(10.0)], limit, 8)
        assert row_with_memory.activations_bytes == expected
        assert row_with_memory.weights_bytes == 10.0


def test_a_test_of_megatron_has_the_options_that_its_name_gives() -> None:
    dims = {
        "layers": 12,
        "hidden": 512,
        "heads": 8,
        "seq_len": 1024,
        "micro_batch": 4,
        "global_batch": 32,
        "gpu": "A100",
        "n_gpus": 8,
    }
    options = {"zero_stage": "distributed-optimizer", "framework": "Megatron-LM", "source": "megatron-golden-values"}

    def workload(name: str, **layout: int) -> Workload:
        return workload_of(row(**dims, **options, model=f"gpt/gpt3_mcore_te_{name}", **layout))

    assert workload("tp2_pp1_multi_dist_optimizer_instances", tp=2).strategy.dp_replicate == 2
    assert workload("tp1_pp4_vp1_uneven_pipeline", pp=4).strategy.stage_layers == (2, 4, 4, 2)
    plain, deferred = (
        rank_memories(workload(f"tp2_pp2_resume{name}", tp=2, pp=2))[-1].allocated_bytes
        for name in ("", "_defer_embedding_wgrad_compute")
    )
    assert (
        deferred - plain == 2 * 2 * 4 * 1024 * 50432 / 2
    )  # gradients in 16 bits of the logits of two micro-batches, half of them here
    stored = {name: not workload(name, tp=2).runtime.flash_attention for name in ("pp1", "pp1_resume", "cross_entropy_loss_fusion")}
    assert stored == {"pp1": True, "pp1_resume": False, "cross_entropy_loss_fusion": False}
    latent = workload("tp2_pp2_mla", tp=2, pp=2).model.layers[0].attention
    assert latent.latent
    assert workload("tp1_pp4_swiglu", pp=4).model.layers[0].feed_forward.hidden == 1344  # 2 / 3 of 4 x 512, in multiples of 64


TEST = {
    "source": "megatron-golden-values",
    "framework": "Megatron-Core dev",
    "gpu": "H100",
    "layers": 12,
    "hidden": 512,
    "heads": 8,
    "seq_len": 1024,
    "micro_batch": 4,
    "global_batch": 32,
    "n_gpus": 8,
}


def test_deterministic_tests_of_megatron_have_larger_workspaces() -> None:
    workspaces = {
        overlap: workload_of(row(**TEST, model="gpt/gpt3_mcore_te_tp1_pp1", overlap=overlap)).runtime.memory.matmul_workspace_bytes
        for overlap in ("deterministic-mode", "")
    }
    assert workspaces == {"deterministic-mode": 32 * 2**20, "": None}


@pytest.mark.parametrize(
    ("name", "precision", "engine"),
    [
        ("bert/bert_mcore_tp2_pp2", "bf16", True),
        ("bert/bert_mcore_tp2_pp2_resume_torch_dist_local_spec", "bf16", False),
        ("gpt/gpt3_mcore_te_tp1_pp1", "bf16", True),
        ("gpt/gpt3_mcore_tp1_pp4", "bf16", False),
        ("gpt/gpt3_mcore_tp2_pp2_uninstall_te", "bf16", False),
        ("gpt/gpt3_weekly_mcore_tp2_pp2", "bf16 + fp8 hybrid", True),
    ],
)
def test_tests_of_megatron_say_in_their_names_whose_layers_they_have(name, precision, engine) -> None:
    rules = workload_of(row(**TEST, model=name, precision=precision)).runtime.memory
    assert (rules.transformer_engine, rules.shared_scores) == (engine, not engine)


def test_tests_of_bert_have_its_heads_and_tests_of_experts_no_biases() -> None:
    bert = workload_of(row(**TEST, model="bert/bert_mcore_tp1_pp2")).model
    assert bert.pooler
    assert bert.head_transform
    experts = (
        workload_of(row(**TEST, model="moe/gpt3_moe_mcore_te_ep8_resume", experts=8, top_k=2, ep=8)).model.layers[0].feed_forward
    )
    assert (experts.hidden, experts.bias) == (1024, False)


def test_tests_that_stand_for_deepseek_v3_have_dense_layers_and_a_layer_for_a_second_token() -> None:
    options = {**TEST, "layers": 15, "hidden": 1024, "heads": 32, "ffn_hidden": 4096, "experts": 32, "top_k": 4, "notes": "; MLA"}
    options |= {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "model": "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading"}
    job_workload = workload_of(row(**options))
    assert [layer.count for layer in job_workload.model.layers] == [3, 13]
    assert job_workload.strategy.stage_layers == (3, 2, 2, 2, 2, 2, 2, 1)


def row(**values: object) -> Row:
    return Row({name: str(value) for name, value in {"status": "ok", "tier": "A", "step_time_s": 1, **values}.items()})


def test_a_throughput_that_is_too_little_for_the_time_to_the_target_is_that_of_one_gpu() -> None:
    """5,000 samples reach the target: 8 GPUs at 10/s in 500 s, or, as one of the rows has it, at 1.25/s."""

    def run(gpus: int, rate: float, seconds: float) -> Row:
        notes = f"time-to-train median {seconds} s"
        return row(source="a", model="net", gpu="H100", n_gpus=gpus, samples_per_s=rate, notes=notes)

    rows = [run(8, 10, 500), run(8, 1.25, 500), run(16, 19, 280), run(1, 1.3, 4000)]
    assert list(contradictions(rows)) == [1]


def test_a_throughput_in_another_unit_is_far_below_that_of_the_same_network_and_gpu() -> None:
    rows = [row(source="a", model="net", gpu="H100", n_gpus=8, samples_per_s=rate) for rate in (8e6, 9e6, 70.0)]
    assert list(contradictions(rows)) == [2]
    assert not contradictions([*rows[:2], row(source="b", model="net", gpu="H100", n_gpus=8, samples_per_s=70.0)])


def test_a_step_faster_than_the_peak_of_the_devices_contradicts() -> None:
    """Llama of 6.9 billion parameters in matmuls, 262,144 tokens on 8 H100: 1.37 s at the peak."""
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    assert not contradictions([Row(values)])
    assert list(contradictions([Row({**values, "step_time_s": "1.0"})])) == [0]


def learned(errors: list[float], groups: list[str], kind: str = "framework") -> float:
    """The factor that is learned from errors (logarithms) of one kind."""
    kinds = [("gpu", kind, "publisher")] * len(errors)
    rows = Errors(errors=np.array(errors), slopes=np.ones((len(errors), 1)), kinds=kinds, groups=groups)
    return float(pooled(rows).parameters(("gpu", kind, "publisher"))[0])


def test_what_is_learned_from_few_groups_is_nearer_to_nothing() -> None:
    one = learned([0.3] * 12, ["a"] * 12)
    many = learned([0.3, 0.28, 0.32] * 4, list("abcdefghijkl"))
    assert 0 < one < many < 0.32
    assert one < 0.2


def test_without_rows_nothing_is_learned() -> None:
    rows = Errors(errors=np.zeros(0), slopes=np.zeros((0, 2)), kinds=[], groups=[])
    assert list(pooled(rows).parameters(("gpu", "framework", "publisher"))) == [0.0, 0.0]
    assert pooled(rows).share(("gpu", "framework", "publisher")) == 0.0


def test_an_impossible_group_moves_nothing() -> None:
    groups = list("abcdefghijkl")
    kept = learned([0.1] * 12, groups)
    moved = learned([*[0.1] * 11, 9.0], groups)
    assert moved == pytest.approx(kept, abs=0.03)


def test_kinds_share_what_their_framework_has() -> None:
    kinds = [(f"gpu {number}", name, "publisher") for name in ("one", "other") for number in range(6)]
    errors = np.array([0.3] * 6 + [0.0] * 6)
    shifts = pooled(
        Errors(errors=errors, slopes=np.ones((12, 1)), kinds=kinds, groups=[str(place) for place in range(12)])
    ).parameters
    assert shifts(("another gpu", "one", "publisher"))[0] > 2 * abs(shifts(("another gpu", "other", "publisher"))[0])
    assert shifts(("another gpu", "another", "publisher"))[0] == 0


def test_parameters_that_do_not_help_rows_left_out_are_not_used() -> None:
    """GPUs of one framework that err alike, and ones of which each says the opposite of the next; ten groups of each."""
    kinds = [(f"gpu {number}", "framework", "publisher") for number in range(4) for _ in range(10)]
    signs = {"alike": [1, 1, 1, 1], "opposite": [1, -1, 1, -1]}
    shifts = {}
    for name, of_gpus in signs.items():
        errors = np.array([0.3 * of_gpus[number] for number in range(4) for _ in range(10)])
        shifts[name] = pooled(Errors(errors=errors, slopes=np.ones((40, 1)), kinds=kinds, groups=[str(row) for row in range(40)]))
    unseen, seen = (("gpu 5", "framework", "publisher"), ("gpu 0", "framework", "publisher"))
    assert shifts["alike"].share(unseen) == shifts["alike"].share(seen) == shifts["opposite"].share(seen) == 1
    assert shifts["opposite"].share(unseen) == 0


def test_parameters_of_other_publishers_count_as_far_as_they_help_one_that_is_left_out() -> None:
    """Publishers of one GPU and framework, each of which says the opposite of the next; all of a publisher's GPUs agree."""
    kinds = [(f"gpu {number % 4}", "framework", f"publisher {number // 4}") for number in range(16)]
    errors = np.array([0.3 * (-1) ** (number // 4) for number in range(16)])
    fit = pooled(Errors(errors=errors, slopes=np.ones((16, 1)), kinds=kinds, groups=[str(row) for row in range(16)]))
    assert fit.share(("gpu 0", "framework", "another")) == 0
    assert fit.share(("another gpu", "framework", "publisher 0")) > 0


def test_orders_are_surer_where_predictions_are_further_apart() -> None:
    """Runs of one group that all are in the predicted order: surer than a half, and no less sure with the gap."""
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    plans = [({"micro_batch": str(size)}, 4.0 / size) for size in (1, 2, 4, 8)]
    scored = [Scored(Row({**values, **change, "step_time_s": str(seconds)}), Predicted(seconds**0.9)) for change, seconds in plans]
    shares = ordered(scored)[Domain.DEVICE]
    assert shares == tuple(sorted(shares))
    assert shares[0] == 0.5 < shares[-1]
    assert not list(pairs([scored[0], replace(scored[0], prediction=Predicted(1.0))])), "the same plan twice is no pair"


def test_the_regret_is_what_the_plan_called_best_takes_more_than_the_best() -> None:
    """Of four plans; the one that is predicted to be fastest is not predicted to fit."""
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    plans = {4.0: Predicted(3.0), 8.0: Predicted(1.0, fits=False), 5.0: Predicted(2.0), 6.0: Predicted(4.0)}
    scored = [Scored(Row({**values, "step_time_s": str(seconds)}), said) for seconds, said in plans.items()]
    shown = figures(scored, len(scored))
    assert (shown["regret_mean_pct"], shown["regret_median_pct"]) == (25.0, 25.0)
    assert "regret_mean_pct" not in figures(scored[:2], 2), "two plans are no choice"


def test_the_page_has_a_line_and_a_panel_for_each_source(tmp_path) -> None:
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    scored = [Scored(Row({**values, "source": name}), Predicted(3.0)) for name in ("one", "two")]
    write_page(tmp_path, scored, {"halved": lambda seed: [replace(scored[0], prediction=Predicted(4.0))]}, range(2))
    page, drawn = (tmp_path / "page.md").read_text(), (tmp_path / "measured_predicted.svg").read_text()
    assert "| one | 1 | 25.0 " in page
    assert "| 0.0 (25.0) | 0 |" in page
    assert drawn.count('class="name"') == 2
    assert drawn.count("measured step<") == drawn.count("predicted step<") == 2
    assert "M" in drawn


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.004, 3.0, [0.01, 0.1, 1.0]), (0.9, 4.5, [1.0, 2.0]), (1.1, 1.9, []), (0.009, 1100.0, [0.01, 1.0, 100.0])],
)
def test_axes_have_whole_decades_or_parts_of_one(low, high, expected) -> None:
    assert _ticks(low, high) == pytest.approx(expected)


PLAYBOOK = "hf-ultrascale-playbook"


@pytest.mark.parametrize(
    ("pp", "n_gpus", "source", "checked"),
    [(2, 16, PLAYBOOK, True), (1, 16, PLAYBOOK, False), (2, 8, PLAYBOOK, False), (2, 16, "vtrain-multi", False)],
)
def test_the_playbooks_pipelines_over_hosts_check_their_collectives(pp, n_gpus, source, checked):
    dims = {"layers": 16, "hidden": 2048, "heads": 32, "seq_len": 4096, "micro_batch": 1, "global_batch": 256, "gpu": "H100"}
    job = workload_of(row(**dims, model="llama-like 1B", source=source, framework="nanotron", pp=pp, n_gpus=n_gpus))
    assert (job.runtime.host.check_rank_us > 0) == checked


def row_of(**values: str) -> Row:
    """A run of Llama 3 8B on eight H100 with some cells changed."""
    names, cells = HEAD.split(","), RUN.format(source="one", status="ok", seconds=4, memory=60).split(",")
    return Row({**dict(zip(names, cells, strict=True)), **values})


GPT = {"model": "GPT 182B", "heads": "96", "kv_heads": "", "ffn_hidden": "", "vocab": "", "n_gpus": "384", "gpu": "A100-80GB"}


@pytest.mark.parametrize(
    ("values", "column", "alternatives"),
    [
        ({}, "precision", ["bf16"]),
        ({"precision": ""}, "precision", ["bf16"]),
        ({"precision": "", "gpu": "V100-32GB"}, "precision", ["fp16"]),
        ({"precision": "", "source": "mlperf-v5.0", "gpu": "NVIDIA B200"}, "precision", ["fp8"]),
        ({"precision": "", "source": "mlperf-v5.1", "gpu": "NVIDIA B200"}, "precision", ["fp8", "fp4"]),
        ({"heads": "", "tp": "8"}, "heads", ["32", "64"]),
        ({"framework": "PyTorch FSDP (fms-fsdp)", "recompute": "selective"}, "recompute", ["none", "full"]),
    ],
)
def test_a_blank_becomes_all_that_it_may_be(values, column, alternatives):
    assert sorted({whole.values.get(column, "") for whole in completed(row_of(**values))}) == sorted(alternatives)


@pytest.mark.parametrize(
    ("values", "layers", "vocabulary"),
    [
        ({"layers": "78", "hidden": "13824"}, 78, 250_880),  # 182.3 billion parameters; with GPT-2's vocabulary 179.6
        ({"model": "GPT 200B", "layers": "80", "hidden": "14400"}, 80, 50_257),
        ({"model": "GPT 183B", "layers": "", "hidden": "14400", "pp": "12"}, 72, 250_880),
    ],
)
def test_the_size_in_a_models_name_decides_what_its_row_leaves_blank(values, layers, vocabulary):
    model = model_of(completed(row_of(**{**GPT, **values}))[0])
    assert (sum(layer.count for layer in model.layers), model.vocab) == (layers, vocabulary)


def test_the_prediction_of_a_blank_lies_between_those_of_what_it_may_be():
    def step_s(**values):
        return truth.PREDICTORS["cold"](row_of(source="mlperf-v5.1", gpu="NVIDIA B200", **values)).step_s

    assert step_s(precision="") == pytest.approx((step_s(precision="fp8") * step_s(precision="fp4")) ** 0.5)


@pytest.mark.parametrize(
    ("cell", "stage", "replicas"),
    [
        ("FSDP2 (3)", 3, 1),
        ("FSDP FULL_SHARD (3)", 3, 1),
        ("SHARD_GRAD_OP", 2, 1),
        ("1 (distributed optimizer)", 1, 1),
        ("1.0", 1, 1),
        ("1 over 8 GPUs (one node)", 1, 2),
        ("HSDP", 3, 2),
        ("FSDP (ici {'fsdp': '8'}; dcn {'data': '2', 'fsdp': '1'})", 3, 2),
        ("FSDP=0", 1, 1),  # NeMo's recipes split the optimizer's state
    ],
)
def test_a_zero_stage_is_read_as_its_source_spells_it(cell, stage, replicas):
    strategy = workload_of(row_of(zero_stage=cell, n_gpus="16", dp="16")).strategy
    assert (strategy.zero_stage, strategy.dp_replicate) == (stage, replicas)


@pytest.mark.parametrize(
    ("cell", "count", "rate_bps"),
    [
        ("4 x 100 Gb/s RoCE", 4, 100e9),
        ("800 Gbps per node (table header)", 8, 100e9),
        ("RDMA 400 Gb/s per GPU", 8, 400e9),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 200Gb/s, Management: 100Gb/s", 8, 200e9),
        ("6 x 200 Gb/s Ethernet", 1, 1200e9),  # six cards that eight devices share
        ("Ethernet, Infiniband", 8, 400e9),  # nothing said: the machine's own
    ],
)
def test_network_cards_are_those_that_a_row_gives(cell, count, rate_bps):
    nics = workload_of(row_of(inter_net=cell, n_gpus="16", dp="16")).cluster.groups[0].host.nics
    assert (nics.count, nics.link.rate_bps) == (count, rate_bps)


def test_a_host_with_a_third_of_the_nvlinks_has_a_third_of_the_rate():
    def rate_bps(cell):
        return workload_of(row_of(gpu="A100-80GB", intra_link=cell)).cluster.groups[0].host.links[0].rate_bps

    assert rate_bps("NVLink (4 NVLink inter-gpu connects per doc)") == pytest.approx(rate_bps("NVLink/NVSwitch") / 3)


def test_rounds_and_tables_of_one_publisher_are_left_out_together():
    sources = ("mlperf-v5.0", "mlperf-v5.1", "dgxc-benchmarking", "nemo-perf-docs", "internevo")
    assert [publisher_of(source) for source in sources] == ["MLPerf", "MLPerf", "NVIDIA", "NVIDIA", "internevo"]


def test_a_figure_in_gigabytes_of_1e9_bytes_is_compared_in_these() -> None:
    memory = PeakMemory(
        weights_bytes=1e9, gradients_bytes=0.0, optimizer_bytes=0.0, activations_bytes=0.0, logits_bytes=0.0, gathered_bytes=0.0
    )
    assert reported_bytes(row_of(memory_kind="peak, GB = 1e9 bytes"), [memory], 80e9) == pytest.approx(2**30)
    assert reported_bytes(row_of(memory_kind="GiB peak (max over ranks)"), [memory], 80e9) == 1e9


def test_retinanet_of_mlperf_warms_validation_up_on_a_batch_of_its_own() -> None:
    row = row_of(
        source="mlperf-v5.0",
        model="RetinaNet SSD",
        n_gpus="8",
        dp="8",
        micro_batch="4",
        global_batch="32",
        grad_accum="1",
        hidden="",
        layers="",
    )
    training, validation = phases_of(row, workload_of(row))
    assert (training.strategy.micro_batch, validation.strategy.micro_batch) == (4, 32)
    assert training.runtime.memory.logits_bytes == 2 * validation.runtime.memory.logits_bytes


def test_micro_batches_of_torchtitans_pipelines_are_as_many_as_its_stages() -> None:
    row = {
        "framework": "torchtitan",
        "n_gpus": "64",
        "dp": "8",
        "pp": "8",
        "micro_batch": "",
        "global_batch": "256",
        "layers": "16",
    }
    single = workload_of(row_of(overlap="torch.compile 1F1B", **row)).strategy
    looped = workload_of(row_of(overlap="torch.compile Interleaved 1F1B", **row)).strategy
    assert (single.virtual_stages, single.micro_batch, looped.virtual_stages, looped.micro_batch) == (1, 4, 2, 2)
    assert not single.reshard


def test_litgpt_splits_parameters_where_it_has_several_devices() -> None:
    assert workload_of(row_of(framework="LitGPT", n_gpus="4", dp="4")).strategy.zero_stage == 3
    assert workload_of(row_of(framework="LitGPT", n_gpus="1", dp="1")).strategy.zero_stage == 0


@pytest.mark.parametrize(
    ("path", "overlap", "framework", "flash"),
    [
        ("golden_values_lts_dgx_a100.json", "deterministic-mode", "Megatron-Core lts", True),
        ("golden_values_lts_dgxa100_dracooci.json", "deterministic-mode", "Megatron-Core lts", False),
        ("golden_values_lts_dgxa100_dracooci.json", "", "Megatron-Core lts", True),
        ("golden_values_dev_dgxa100_dracooci.json", "deterministic-mode", "Megatron-Core dev", True),
    ],
)
def test_deterministic_tests_in_old_containers_store_scores(path, overlap, framework, flash) -> None:
    model = "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist"
    test = row(**{**TEST, "gpu": "A100", "model": model, "framework": framework, "source_path": path, "overlap": overlap})
    assert workload_of(test).runtime.flash_attention == flash


def test_tests_of_reinforcement_learning_keep_keys_and_values_for_what_they_generate() -> None:
    test = row(**{**TEST, "model": "gpt/gpt_grpo_tp1_pp1_dp8_583m", "memory_kind": "GiB torch max allocated"})
    memory = rank_memories(workload_of(test))[-1]
    assert reported_bytes(test, [memory], 80e9) == memory.allocated_bytes + 40 * 2**30
    large = row(**{**TEST, "model": "gpt/gpt_grpo_tp4_pp1_dp2_8b", "memory_kind": "GiB torch max allocated"})
    assert reported_bytes(large, [memory], 80e9) == memory.allocated_bytes + 20 * 2**30
    assert not model_of(large).tied


@pytest.mark.parametrize(
    ("micro_batch", "grad_accum", "global_batch", "n_gpus", "micro", "batch"),
    [
        ("128", "64", "65536", "8", 128, 65536),
        ("8192", "64", "4194304", "8", 128, 4194304),  # what a step accumulates
        ("126", "32.508", "65536.128", "16", 128, 65536),  # 4096 sequences in 32 steps
    ],
)
def test_micro_batches_of_nvidias_bert_are_those_of_its_scripts(
    micro_batch, grad_accum, global_batch, n_gpus, micro, batch
) -> None:
    given = {"micro_batch": micro_batch, "grad_accum": grad_accum, "global_batch": global_batch, "n_gpus": n_gpus, "dp": n_gpus}
    bert = {"source": "nvidia-deeplearningexamples", "framework": "PyTorch", "model": "BERT", "seq_len": "128", "gpu": "A100-80GB"}
    dims = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"), "")
    strategy = workload_of(row_of(**given, **bert, **dims)).strategy
    assert (strategy.micro_batch, strategy.global_batch) == (micro, batch)


def test_an_a100_of_either_size_has_the_larger_memory() -> None:
    (group,) = workload_of(row_of(gpu="NVIDIA A100 (40/80 GB not stated)")).cluster.groups
    assert group.host.device.memory_bytes > 60e9
