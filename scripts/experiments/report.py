"""results/REPORT.md and its plots, made from the stored rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import drawing
from experiments.base import Claim, Experiment, Findings, Rows, Table
from experiments.catalogue import EXPERIMENTS, WAITING
from experiments.published import ASSUMED, DERIVED, PRINTED, READ_OFF, SUMMARY
from experiments.store import Store

DPI = 130
HEAD = f"""# The paper's tables and figures, repeated

Made by `scripts/paper.py report` from the rows beside it (a JSON file per experiment); do not edit.

The rack is played by one machine: workers and PBox in network namespaces, links shaped. With a
dilation of D, links are D times slower than those named and emulated compute takes D times as long;
all times and rates below are undilated again, so they are those of the rack that is played.
"link-bound" experiments keep what links allow: ratios between systems. "cpu-bound" ones ran at full
speed and say something of this machine. Every element of every result was compared with a closed
form (wrong = 0, or the run failed), and the links' own counters moved at least what they must.

Values of the paper: {PRINTED} on the authors' posters, {READ_OFF} a chart of theirs, {DERIVED} from
printed ones, {SUMMARY} from a summary of the paper. {ASSUMED} values are ours.
"""


def write(store: Store, folder: Path) -> list[Claim]:
    """Write the report and its plots into a folder; all claims made in it."""
    parts: list[str] = []
    claims: list[tuple[Experiment, Claim]] = []
    for experiment in EXPERIMENTS.values():
        rows = store.rows(experiment.name)
        found = experiment.findings(Rows(rows)) if rows or not _measures(experiment) else None
        if found is not None:
            claims += [(experiment, claim) for claim in found.claims]
            _draw(experiment, Rows(rows), folder)
        parts.append("\n".join(_section(experiment, Rows(rows), found)))
    text = "\n".join([HEAD, *_verdicts(claims), *parts, *_waiting()])
    folder.joinpath("REPORT.md").write_text(text + "\n", encoding="utf-8")
    return [claim for _, claim in claims]


def _measures(experiment: Experiment) -> bool:
    return experiment.kind != "arithmetic"


def _verdicts(claims: Sequence[tuple[Experiment, Claim]]) -> Iterator[str]:
    """What does not hold comes first."""
    parts = (
        ("Required here, and not reached", True, False),
        ("Not required (of the paper, or compared with), and not so here", False, False),
        ("Required here, and reached", True, True),
        ("Not required (of the paper, or compared with), and so here too", False, True),
    )
    for title, bar, holds in parts:
        chosen = [(e, c) for e, c in claims if c.bar is bar and c.holds is holds]
        if chosen or not holds:
            yield f"## {title}\n"
            lines = [f"- {experiment.name}: {claim.text}" for experiment, claim in chosen]
            yield "\n".join(lines or ["- nothing"]) + "\n"


def _section(experiment: Experiment, rows: Rows, found: Findings | None) -> Iterator[str]:
    yield f"## {experiment.name}: {experiment.title}\n"
    yield f"*{experiment.kind}*. In the paper: {experiment.in_paper}.\n"
    if found is None:
        yield "Not measured yet.\n"
        return
    yield f"Set-up: {experiment.differs}\n"
    for table in found.tables:
        yield from _table(table)
    for claim in found.claims:
        mark = {True: "yes", False: "**no**", None: "note"}[claim.holds]
        yield f"- [{mark}] {claim.text}"
    yield f"\n![{experiment.title}]({experiment.name}.png)\n"
    yield from _provenance(rows)


def _table(table: Table) -> Iterator[str]:
    head, *lines = table.lines
    yield f"{table.caption}:\n"
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for line in lines:
        yield f"| {' | '.join(line)} |"
    yield ""


def _provenance(rows: Rows) -> Iterator[str]:
    """Of which code the rows are, and which of them the machine held up, rather than links."""
    if not len(rows):
        return
    commits, dates = rows.values("commit"), rows.values("date")
    dilations = ", ".join(f"{value:g}" for value in rows.values("dilation"))
    code = f"commit {', '.join(commits)}, {', '.join(dates)}"
    yield f"{len(rows)} rows, {code}; dilation {dilations}."
    bound = [row for row in rows if row.get("cpu_bound")]
    if bound:
        names = ", ".join(f"{row['system']} {row.get('model', '')}".strip() for row in bound)
        yield f"cpu-bound, so slower than links allow: {len(bound)} of them ({names})."
    yield ""


def _waiting() -> Iterator[str]:
    yield "## Waiting\n"
    for one in WAITING:
        yield f"- {one.name}: {one.title}. It waits for {one.needs}."


def _draw(experiment: Experiment, rows: Rows, folder: Path) -> None:
    figure = drawing.new_figure()
    experiment.draw(rows, figure)
    folder.mkdir(parents=True, exist_ok=True)
    # Without the version that made it: the same rows give the same file.
    figure.savefig(folder / f"{experiment.name}.png", dpi=DPI, metadata={"Software": None})
