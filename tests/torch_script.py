"""A training script, which its launcher tells who it is: the same under phubrun, mpirun, torchrun,
or alone."""

import torch
import torch_training as training

import phub_collective.torch as hvd

if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    error = training.train({})
    assert error <= 1e-5, error
    print(f"rank {hvd.rank()} of {hvd.size()} trained", flush=True)
    hvd.shutdown()
