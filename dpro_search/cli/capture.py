"""`dpro-search capture`: the step graph of a model without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import JsonOption

if TYPE_CHECKING:
    from dpro_search.collect.capture import CapturedStep


def capture(
    model: Annotated[str, typer.Argument(metavar="SCRIPT:FUNCTION", help="A script and its function that returns the model.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write: graph.json, job.toml.")],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="A=N,B=N", help="Ranks along dp (DDP), dp_shard (fully_shard; both: HSDP), tp, pp, cp, ep."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Samples of one replica, or of a micro-batch.")] = 1,
    sequence: Annotated[int | None, typer.Option("--sequence", metavar="N", min=1, help="Tokens of a sample.")] = None,
    precision: Annotated[
        str, typer.Option("--precision", metavar="P", help="bf16 or fp16 (autocast; FSDP: mixed precision), or fp32.")
    ] = "bf16",
    inputs: Annotated[
        str | None,
        typer.Option("--inputs", metavar="F", help="Function of batch (and sequence): what the model reads."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option("--loss", metavar="F", help="Function of output and inputs.", show_default="output.loss, or cross-entropy"),
    ] = None,
    tp_plan: Annotated[
        str | None,
        typer.Option("--tp-plan", metavar="F", help="Function of the model: plan for parallelize_module.", show_default="by names"),
    ] = None,
    parallelize: Annotated[
        str | None,
        typer.Option("--parallelize", metavar="F", help="Function of model and DeviceMesh that applies the mesh."),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option("--schedule", metavar="S", help="Of pp, as in job.toml."),
    ] = "1f1b",
    virtual_stages: Annotated[
        int, typer.Option("--virtual-stages", metavar="N", min=0, help="Stages on each rank.", show_default="by schedule")
    ] = 0,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", metavar="N", min=0, help="Of a step.", show_default="twice the ranks of pp")
    ] = 0,
    rotate: Annotated[str, typer.Option("--rotate", metavar="R", help="Of cp: allgather, alltoall.")] = "allgather",
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="O", help="adam, adamw, sgd or none.")] = "adamw",
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="For job.toml.", show_default="as many h100 as the mesh has ranks")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PYTHON", help="Interpreter with PyTorch or JAX.", show_default="make_env.sh's"),
    ] = None,
    jax: Annotated[
        bool, typer.Option("--jax", help="Compile a JAX step for devices that need not be here; the function gets the Mesh.")
    ] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="C", help="With --jax: a slice (v6e:16x16), GPUs (4xhgx-h100), 4xtestbed@1gbit.")
    ] = None,
    choose: Annotated[
        str, typer.Option("--choose", metavar="A=V,B=V", help="With --jax: values of CHOICES.", show_default="the first")
    ] = "",
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", min=1, help="Seconds until the capture is ended.")
    ] = 1800,
    timed: Annotated[bool, typer.Option("--timed", help="With --jax on a testbed: run the step here too, and time it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Capture a model's training step on tensors without data, or as XLA compiles it. Every verb takes the result as TRACE.

    Example: dpro-search capture train.py:build_model --batch 4 --sequence 2048 --mesh dp_shard=8,tp=2 --out captured
    """
    if jax:
        _program(model, out, mesh=mesh, on=on, choose=choose, python=python, time_limit_s=time_limit, timed=timed, as_json=as_json)
        return
    from dpro_search.cli.printing import print_json, size, stderr_console, warn
    from dpro_search.collect.capture.runner import capture_request
    from dpro_search.kinds import write_captured

    request = capture_request(
        model,
        python=python,
        mesh=mesh or "",
        inputs=inputs,
        loss=loss,
        tp_plan=tp_plan,
        parallelize=parallelize,
        batch=batch,
        sequence=sequence,
        precision=precision,
        optimizer=optimizer,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
        rotate=rotate,
        timeout_s=time_limit,
    )
    with stderr_console().status("starting") as status:
        graph = write_captured(request, out, cluster, lambda what: status.update(f"capturing: {what}"))
    for note in graph.notes:
        warn(note)
    step = graph.under_mesh or graph.plain
    sent = _sent(step)
    facts = {
        "graph": str(out / "graph.json"),
        "job": str(out / "job.toml"),
        "model": graph.model,
        "torch": graph.torch,
        "mesh": graph.mesh,
        "ops": len(step.ops),
        "parameters": sum(each.elements for each in graph.plain.parameters),
        "parameters_bytes": graph.parameter_bytes,
        "flops": step.flops(),
        "activations_bytes": step.activation_bytes,
        "peak_memory_bytes": step.peak_bytes,
        "collectives": sent,
        "places": [
            {
                "ops": len(each.ops),
                "parameters_bytes": each.local_parameter_bytes,
                "flops": each.flops(),
                "peak_memory_bytes": each.peak_bytes,
                "collectives": _sent(each),
            }
            for each in graph.places
        ],
        "notes": list(graph.notes),
    }
    if as_json:
        print_json(facts)
        return
    print(f"{graph.model}: {facts['parameters']:,} parameters ({size(graph.parameter_bytes)}), PyTorch {graph.torch}")
    where = "rank 0 of the mesh" if graph.under_mesh else "one device"
    print(
        f"a step of {where}: {len(step.ops):,} ops, {step.flops() / 1e9:,.1f} GFLOP, {size(step.activation_bytes)} of activations"
    )
    for name, each in sent.items():
        print(f"  {each['count']} x {name.replace('_', '-')}, {size(each['bytes'])}")
    for number, place in enumerate(graph.places):
        held = f"{size(place.local_parameter_bytes)} of parameters, peak {size(place.peak_bytes)}"
        print(f"  place {number} in the pipeline: {len(place.ops):,} ops, {place.flops() / 1e9:,.1f} GFLOP, {held}")
    print(f"next: dpro-search replay {out / 'job.toml'} --cluster 8xhgx-h100")


def _program(
    model: str,
    out: Path,
    *,
    mesh: str | None,
    on: str | None,
    choose: str,
    python: str | None,
    time_limit_s: float,
    timed: bool,
    as_json: bool,
) -> None:
    """Compile a JAX step, and say what the program has."""
    from dpro_search.cli.printing import print_json, size, stderr_console, warn
    from dpro_search.collect.readers.xla import collectives
    from dpro_search.graph.hlo import executions, program_work
    from dpro_search.kinds.xla.capture import capture_program, program_request

    request = program_request(model, on=on, mesh=mesh or "", choose=choose, python=python, time_limit_s=time_limit_s, timed=timed)
    with stderr_console().status("starting") as status:
        program = capture_program(request, out, lambda what: status.update(f"capturing: {what}"))
    for warning in program.warnings:
        warn(warning)
    module, memory, turns = program.module, program.facts.memory, executions(program.module)
    sent: dict[str, dict[str, int]] = {}
    for collective in collectives(module):
        total = sent.setdefault(collective.kind, {"count": 0, "bytes": 0})
        count = turns[collective.computation.name] or 1
        total["count"] += count
        total["bytes"] += count * collective.operand_bytes
    flops = program_work(module).matrix_flops
    if as_json:
        facts = {"program": str(out), "module": module.name, "devices": module.devices, "instructions": module.instruction_count}
        facts |= {
            "mesh": program.facts.mesh,
            "choices": program.facts.chosen,
            "flops": flops,
            "peak_memory_bytes": None if memory is None else memory.peak_bytes,
        }
        print_json({**facts, "collectives": sent, "compile_s": program.facts.compile_s, "versions": program.facts.versions})
        return
    title = f"{module.name}: {module.instruction_count:,} instructions for {module.devices} devices"
    print(f"{title}, compiled in {program.facts.compile_s:.0f} s")
    held = "" if memory is None else f", {size(memory.peak_bytes)} of memory"
    print(f"a step of one device: {flops / 1e9:,.1f} GFLOP of matrix products{held}")
    for name, each in sent.items():
        print(f"  {each['count']:,} x {name}, {size(each['bytes'])}")
    print(f"next: dpro-search replay {out}, dpro-search diagnose {out}")


def _sent(step: CapturedStep) -> dict[str, dict[str, int]]:
    """Number and bytes of collectives and messages by type."""
    totals: dict[str, dict[str, int]] = {}
    for each in step.collectives:
        total = totals.setdefault(each.type, {"count": 0, "bytes": 0})
        total["count"] += 1
        total["bytes"] += each.bytes
    return totals
