"""`phubrun --check-build`: what this installation can do, in the layout that Horovod users know."""

from __future__ import annotations

import importlib.util

import phub_collective

TITLES = {
    "pbox": "PBox",
    "pshard": "PShard",
    "ring": "ring",
    "halving_doubling": "halving_doubling",
    "mpi": "MPI",
    "gloo": "Gloo",
    "zmq_ps": "ZMQ server (MXNet's)",
}


def report() -> str:
    """The text; backends are asked, not guessed, and say why they cannot be used."""
    from phub_collective import backends

    torch, mpi = (importlib.util.find_spec(name) is not None for name in ("torch", "mpi4py"))
    operations = {TITLES.get(name, name): reason for name, reason in backends.available().items()}
    groups: list[tuple[str, dict[str, str | None]]] = [
        ("Available Frameworks", {"PyTorch": _unless(torch, "torch")}),
        (
            "Available Controllers",
            {
                "phubrun": None,
                "MPI": _unless(mpi, "mpi"),
                "torchrun": _unless(torch, "torch"),
            },
        ),
        ("Available Tensor Operations", operations),
    ]
    lines = [f"phub_collective v{phub_collective.__version__}:"]
    for title, entries in groups:
        lines += ["", f"{title}:"]
        for name, reason in entries.items():
            lines.append(f"    [{' ' if reason else 'X'}] {name}{f' ({reason})' if reason else ''}")
    return "\n".join(lines)


def _unless(found: bool, extra: str) -> str | None:
    return None if found else f"pip install 'phub-collective[{extra}]'"
