"""All experiments, in the order of the report; and those that wait for systems to come."""

from __future__ import annotations

from experiments.base import Experiment, Waiting
from experiments.figure01 import Figure1
from experiments.figure02 import Figure2
from experiments.figure06 import Figure6
from experiments.figure15 import Figure15
from experiments.figure16 import Figure16, Lanes
from experiments.figure17 import Figure17
from experiments.figure18 import Figure18
from experiments.hook import Hook
from experiments.networks import Figure12, Figure13
from experiments.requirements import Floors
from experiments.selector import Selector
from experiments.table02 import Table2
from experiments.table05 import Table5

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        Floors(),
        Selector(),
        Hook(),
        Figure1(),
        Table2(),
        Figure2(),
        Figure6(),
        Figure12(),
        Figure13(),
        Figure15(),
        Figure16(),
        Lanes(),
        Figure17(),
        Figure18(),
        Table5(),
    )
}

MXNET = "rows of the ZMQ parameter server (backend zmq_ps) in the lab"
BENCH = "rows of `phub bench kernels`, which measures it"
WAITING = (
    Waiting("figure5", "Where a step's time goes, before", f"{MXNET}; timers of a step's parts"),
    Waiting("figure14", "Where a step's time goes, after", "timers of a step's parts"),
    Waiting("affinity", "Key by interface and core against worker by interface", "that placement"),
    Waiting("tall", "Tall against wide aggregation", BENCH),
    Waiting("table4", "Caching against bypassing kernels", BENCH),
    Waiting("figure19", "Hierarchical reduction over 2 to 8 racks", "hierarchical reduction"),
    Waiting("two_bit", "Against 2-bit compression", f"compression in the lab's workers; {MXNET}"),
    Waiting("factors", "Sufficient factors against workers", "sufficient-factor broadcasting"),
    Waiting("baselines", "MXNet's rows in figures 2, 12, 13, 15", MXNET),
)  # fmt: skip
