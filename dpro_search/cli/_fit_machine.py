"""The part of `dpro-search fit` on this machine: measures constants of cost models into a machine file."""

from __future__ import annotations

from pathlib import Path


def measure_this_machine(out: Path, rounds: int, as_json: bool) -> None:
    """Measure this machine into the file `out`, and print probes and scaled constants beside the bundled ones."""
    from dpro_search.cli._output import print_json, stderr_console
    from dpro_search.machine import BUNDLED, load_machine
    from dpro_search.measure.machine import PROBES, measure_machine, value_of

    with stderr_console().status("starting") as status:
        constants = measure_machine(out, rounds=rounds, on_progress=status.update)
    bundled = load_machine(BUNDLED)
    names = [name for probe_name, probe in PROBES.items() for name in (f"probes.{probe_name}", *probe.scaled)]
    values = [
        {"name": name, "value": value_of(constants, name), "bundled": value_of(bundled, name), "how": constants.origins[name].how}
        for name in names
    ]
    left = sum(origin.status == "bundled" for origin in constants.origins.values())
    if as_json:
        print_json({"machine_file": str(out), "models": [], "values": values, "not_measured": left})
        return
    for row in values:
        print(f"{row['name']:30} {row['value']:<10.4g} bundled {row['bundled']:.4g}")
    print(f"{left} other constants are bundled ones, not measured here: they need a framework or recorded jobs")
    print(f"machine file: {out} (use it with --machine {out})")
