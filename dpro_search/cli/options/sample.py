"""The option ``--sample``, and what `run` says about a bundled recording: real runs of its plans, and how to use one's own job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dpro_search.collect.sample import BundledSample
    from dpro_search.deploy.validate import Validation
    from dpro_search.search import SearchResult
    from dpro_search.space.plan import Plan


def _names() -> list[str]:
    from dpro_search.collect.sample import samples

    return [sample.name for sample in samples()]


SampleOption = Annotated[
    str | None, typer.Option("--sample", autocompletion=_names, metavar="NAME", help="A bundled trace: see 'dpro-search samples'.")
]


def folder_of(trace: Path | None, sample: str | None) -> Path:
    """The folder that an optional TRACE or ``--sample`` names; raises `InputError` for both, or an unknown sample.

    Of a profile that `import` reads, the folder of its trace, which is made once and kept in a cache.
    """
    from dpro_search.collect.sample import sample_trace_path
    from dpro_search.errors import InputError

    if trace is not None and sample is not None:
        raise InputError(f"--sample {sample} and {trace}: leave out one of them")
    return sample_trace_path(sample) if trace is None else imported(trace)


def imported(path: Path) -> Path:
    """A trace's folder as it is; of a profile that `import` reads, the folder of its trace in the cache, said on stderr."""
    from dpro_search.cli.printing import stderr_console
    from dpro_search.kinds import described_in

    if (path / "meta.json").is_file() or path.suffix == ".toml" or described_in(path) is not None:
        return path
    from dpro_search.collect.readers.cached_import import trace_of_profile

    imported = trace_of_profile(path)
    if imported is None:
        return path
    how = "imported into" if imported.is_new else "its trace was imported before:"
    stderr_console().print(f"{path}: {how} {imported.folder}", soft_wrap=True, highlight=False)
    return imported.folder


def validation_of(sample: BundledSample) -> Validation | None:
    """Real runs of a sample's plans; None: there were none."""
    from dpro_search.deploy.validate import Validation

    return None if sample.validation is None else Validation.load(sample.folder)


def measured_sentences(sample: BundledSample, plans: Sequence[Plan]) -> list[str]:
    """Predicted and measured speed-up of the listed plans that ran for real, a sentence each."""
    from dpro_search.quantities import time_text

    validation = validation_of(sample)
    if validation is None:
        return []
    base = time_text(validation.baseline_us)
    return [
        f"Plan {plans.index(ran.plan) + 1} on real runs: {time_text(ran.measured_us)} instead of {base}, measured"
        f" speed-up {ran.speedup_measured:.2f}x (predicted {ran.speedup_predicted:.2f}x)."
        for ran in validation.plans
        if ran.plan in plans
    ]


_OWN_JOB = """\
The same for your job (F and C: see 'dpro-search collect --help'):
  dpro-search collect --framework F --comm C --out trace -- python train.py
  dpro-search run trace --out runs/mine
  dpro-search validate runs/mine -- python train.py"""


def print_sample(console: Console, folder: Path, result: SearchResult) -> None:
    """After the search of a bundled trace: what real runs of its plans gave, and the commands for another job."""
    from dpro_search.collect.sample import sample_of

    sample = sample_of(folder)
    if sample is None:
        return
    for sentence in measured_sentences(sample, [ranked.plan for ranked in result.plans]):
        console.print(sentence, highlight=False)
    console.print(_OWN_JOB, soft_wrap=True, highlight=False)
