"""What `phub probe` finds between the hosts of a lab, one pair at a time, in rates of the links
that are played. Started on every host by phubrun; rank 0 writes it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.topology import MTU_SHARE
from phub_collective.probing.measure import measure
from phub_collective.session import Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    factor = 8 / 1e9 / MTU_SHARE * float(os.environ.get("PHUB_LAB_DILATION", "1"))
    with Session.open() as session:
        matrix = measure(session.context, alone=True)
        if session.rank == 0:
            played = [[r if r is None else r * factor for r in line] for line in matrix.bandwidth]
            args.json.write_text(json.dumps({"gbps": played, "groups": matrix.groups}))


if __name__ == "__main__":
    main()
