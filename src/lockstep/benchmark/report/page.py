"""One HTML page that tells of runs and bundles, and needs nothing but itself."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lockstep.benchmark.amounts import plural
from lockstep.benchmark.report.bundle_section import bundle_section
from lockstep.benchmark.report.comparison_section import comparison_sections
from lockstep.benchmark.report.content import Section, Words
from lockstep.benchmark.report.inputs import Inputs
from lockstep.benchmark.report.run_section import run_section
from lockstep.benchmark.report.runs_section import runs_sections
from lockstep.benchmark.report.scaling_section import scaling_section


def make_page(inputs: Inputs, names: Mapping[Path, str]) -> str:
    """Return the page.

    Args:
        inputs: at least one of them.
        names: of the bundles and sweeps, as the page shall call them.
    """
    named = [(names[path], bundle) for path, bundle in inputs.bundles]
    sweeps = [(names[path], sweep) for path, sweep in inputs.sweeps]
    with np.errstate(all="ignore"):  # a damaged file may hold numbers beyond all measure
        sections = [
            *(scaling_section(sweep, name, number) for number, (name, sweep) in enumerate(sweeps, 1)),
            *comparison_sections(named),
            *(bundle_section(bundle, name, number) for number, (name, bundle) in enumerate(named, 1)),
            *runs_sections(inputs.runs),
            *(run_section(run, number) for number, run in enumerate(inputs.runs, 1)),
        ]
    notes = Words(tuple(("", text) for text in inputs.left_out), title="Left out", tone="note")
    page = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=sections[0].title if len(sections) == 1 else _title(inputs),
            sections=sections,
            notes=notes if inputs.left_out else None,
            made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
            contents=_contents(sections),
        )
    )
    # A file's name need not be text, nor what a damaged file holds.
    return page.encode(errors="replace").decode()


def _title(inputs: Inputs) -> str:
    tasks = dict.fromkeys(
        [
            *(sweep.task for _, sweep in inputs.sweeps),
            *(bundle.run.task for _, bundle in inputs.bundles),
            *(run.task for run in inputs.runs),
        ]
    )
    shown = ", ".join(tasks) if len(tasks) <= 3 else plural(len(tasks), "task")
    parts = [(len(inputs.sweeps), "scaling sweep"), (len(inputs.bundles), "benchmark"), (len(inputs.runs), "run")]
    return f"{shown}: {', '.join(plural(number, word) for number, word in parts if number)}"


def _contents(sections: Sequence[Section]) -> list[Section]:
    """Return what a table of contents lists; a page of one section needs none."""
    return list(sections) if len(sections) > 1 else []


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
