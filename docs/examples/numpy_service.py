"""Linear regression by several workers through a PBox, with NumPy and nothing else.

phub serve --port 4000                                  # in one terminal
python docs/examples/numpy_service.py 127.0.0.1:4000    # in another: two workers
"""

import multiprocessing
import sys

import numpy as np

from phub_collective import SGD, connect_service, create_service

WORKERS, STEPS = 2, 200


def train(address: str, token: str, rank: int) -> float:
    """Fit y = x @ w + b to this worker's part of the data; the largest error of w."""
    random = np.random.default_rng(rank)  # each worker has data of its own
    truth = np.arange(5.0)
    x = random.standard_normal((100, 5))
    y = x @ truth + 3.0
    with connect_service(address, "regression", token, rank) as service:
        start = {"w": np.zeros(5), "b": np.zeros(1)}
        weights = service.init(start, optimizer=SGD(lr=0.1, momentum=0.5))
        for _ in range(STEPS):
            error = x @ weights["w"] + weights["b"] - y
            service.push("b", error.mean(keepdims=True))  # on its way while w is computed
            weights["w"] = service.push_pull("w", x.T @ error / len(x))
            weights["b"] = service.pull("b")
    return float(np.abs(weights["w"] - truth).max())


def main(address: str) -> list[float]:
    token = create_service(address, "regression", WORKERS)
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        return pool.starmap(train, [(address, token, rank) for rank in range(WORKERS)])


if __name__ == "__main__":
    print("largest errors:", main(sys.argv[1]))
