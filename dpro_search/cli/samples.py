"""`dpro-search samples`: the bundled traces."""

from __future__ import annotations

from dpro_search.cli.options import JsonOption


def samples(
    as_json: JsonOption = False,
) -> None:
    """List the bundled traces, and what real runs of their best plans gained.

    Example: dpro-search samples
    """
    from dpro_search.cli.options.sample import validation_of
    from dpro_search.cli.printing import print_json
    from dpro_search.collect import sample

    rows = []
    for one in sample.samples():
        validation = validation_of(one)
        measured = max((plan.speedup_measured for plan in validation.plans), default=None) if validation is not None else None
        rows.append(
            {
                "name": one.name,
                "folder": str(one.folder),
                "description": one.description,
                "provenance": one.provenance.strip(),
                "measured_speedup": measured,
            }
        )
    if as_json:
        print_json({"samples": rows})
        return
    for row in rows:
        gain = "" if row["measured_speedup"] is None else f" Best plan on real runs: {row['measured_speedup']:.2f}x."
        print(f"{row['name']}\n  {row['description']}.{gain}")
