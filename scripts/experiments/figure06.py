"""Figure 6: the rates between all pairs of hosts as `phub probe` finds them, and the groups that
they give away."""

from __future__ import annotations

from lab.topology import Shape
from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table, number
from experiments.cells import Cell

HOSTS = 8
DILATION = 50.0
WITHIN = 0.03


def matrix() -> dict[tuple[int, int], float]:
    """Bits per second by pair of ranks (hosts of the paper from 1 on)."""
    groups = [{host - 1 for host in group} for group in published.FIGURE_6_GROUPS]
    return {
        (one, other): 1e9 * _rate(any({one, other} <= group for group in groups))
        for one in range(HOSTS)
        for other in range(HOSTS)
        if one != other
    }


def _rate(together: bool) -> float:
    return published.FIGURE_6_INSIDE if together else published.FIGURE_6_ACROSS


class Figure6(Experiment):
    name = "figure6"
    title = "Pairwise rates of eight hosts, and their groups"
    kind = "link-bound"
    in_paper = "a triangle of printed rates: 8.9 to 9.0 Gbit/s inside two groups, 4.7 across"
    differs = (
        "The links are shaped pair by pair to the paper's rates (8.95 and 4.7), so the rates "
        "found only show that the probe measures right; what it has to find out are the groups."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        pairs = matrix()
        hosts = HOSTS
        if scale is Scale.QUICK:
            hosts = 3
            pairs = {pair: rate for pair, rate in pairs.items() if max(pair) < hosts}
        shape = Shape(hosts, 1, 10e9, 0, 0.0, DILATION, pairs)
        labels = {"system": "probe", "workers": hosts}
        return [Cell("pairs", shape, labels=labels, seconds=20 + 0.6 * hosts**2, memory=1 << 30)]

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        row = rows.one()
        if row is None:
            return found
        rates, hosts = row["gbps"], range(row["workers"])
        titles = ["from \\ to", *(str(host + 1) for host in hosts)]
        lines = [
            [str(a + 1), *("-" if a == b else number(rates[a][b]) for b in hosts)] for a in hosts
        ]
        found.tables.append(Table("Gbit/s of the played links, headers included", [titles, *lines]))
        named = [[host + 1 for host in group] for group in row["groups"]]
        wanted = [[h for h in group if h <= len(hosts)] for group in published.FIGURE_6_GROUPS]
        found.claim(f"The groups found are {named}, the paper's are {wanted}.", named == wanted)
        shaped = matrix()
        worst = max(
            abs(rates[a][b] * 1e9 / shaped[a, b] - 1) for a in hosts for b in hosts if a != b
        )
        found.claim(
            f"The rates found are within {worst:.1%} of those asked for.", worst < WITHIN, bar=True
        )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        row = rows.one()
        axes = figure.subplots()
        if row is None:
            return
        rates = [[0.0 if rate is None else rate for rate in line] for line in row["gbps"]]
        axes.imshow(rates, cmap="Greys", vmin=0, vmax=12)
        for a, line in enumerate(rates):
            for b, rate in enumerate(line):
                axes.text(b, a, f"{rate:.1f}" if a != b else "", ha="center", va="center")
        hosts = range(len(rates))
        axes.set_xticks(hosts, [str(host + 1) for host in hosts])
        axes.set_yticks(hosts, [str(host + 1) for host in hosts])
        drawing.labelled(axes, "to host", "from host")
        axes.grid(visible=False)
