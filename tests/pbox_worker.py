"""A worker process for tests, driven by JSON lines on standard input, so that one process serves
many jobs: {"address", "job", "token", "rank", "lane", "elements"} starts an endless training, which
answers "training" after its first step and, at its end, the error. {"exit": CODE} ends it."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import numpy as np

from phub_collective.backends.base import SGD
from phub_collective.backends.pbox.service import connect_service
from phub_collective.config import Config
from phub_collective.errors import PhubError


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def train(order: dict[str, Any]) -> None:
    """Push and pull until an error comes."""
    who = order["address"], order["job"], order["token"], order["rank"]
    gradient = np.ones(order["elements"], np.float32)
    try:
        config = Config(lane=order["lane"], timeout=order["timeout"])
        with connect_service(*who, config) as service:
            service.init({"w": gradient, "b": gradient[:10]}, SGD(lr=0.1, momentum=0.9))
            steps = 0
            while True:
                service.push("b", gradient[:10])
                service.push_pull("w", gradient)
                service.pull("b")
                steps += 1
                if steps == 1:
                    say(state="training")
    except PhubError as error:
        rank = getattr(error, "rank", None)
        say(state="ended", error=type(error).__name__, rank=rank, text=str(error))


def main() -> None:
    say(state="ready", pid=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        if "exit" in order:
            os._exit(order["exit"])
        threading.Thread(target=train, args=(order,), daemon=True).start()


if __name__ == "__main__":
    main()
