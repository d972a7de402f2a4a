"""Joining and leaving a job with the torch face; a job of one needs nothing else."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phub_collective.torch as hvd
from phub_collective import backends
from phub_collective.errors import ConfigError, PeerLost
from phub_collective.rendezvous.identity import LAUNCH_VARIABLES
from phub_collective.torch.absent import ABSENT
from phub_collective.torch.context import Face


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, and no job left behind."""
    for variable in (*LAUNCH_VARIABLES, "WORLD_SIZE", "PMI_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    yield
    hvd.shutdown()


def test_everything_else_asks_for_init() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.cross_size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ConfigError, match=r"call hvd.init\(\) first"):
            call()
    hvd.shutdown()  # does nothing


@pytest.mark.parametrize(
    "backend", [name for name in ("gloo", "pbox") if backends.unavailable_reason(name) is None]
)
def test_job_of_one(backend: str) -> None:
    hvd.init(backend=backend)
    hvd.init()  # once is enough
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.allreduce(torch.tensor([2.0, 4.0])).tolist() == [2.0, 4.0]
    assert hvd.broadcast_object([1, "a"], 0) == [1, "a"]
    hvd.barrier()
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
    torch.nn.init.zeros_(model.weight)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-1.0, -1.0]]
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_forked_child_does_not_say_farewell() -> None:
    """A data loader's worker that ends must not take the job along."""
    hvd.init(backend="gloo")
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
    child = os.fork()
    if child == 0:
        hvd.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"comm": [0]}, "jobs of a part of the ranks are not available"),
        ({"process_sets": [[0]]}, "jobs of a part of the ranks are not available"),
        ({"backend": "carrier_pigeon"}, "carrier_pigeon"),
        ({"colour": "red"}, "unknown settings"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hvd.init(**arguments)
    assert not hvd.is_initialized()


def test_init_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> tuple[int, int]:
        raise PeerLost("[rendezvous] rank 1 died", 1)

    with monkeypatch.context() as patch:
        patch.setattr(Face, "cross", fail)
        with pytest.raises(PeerLost):
            hvd.init(backend="gloo")
    assert not hvd.is_initialized()
    hvd.init(backend="gloo")
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize("name", ABSENT)
def test_what_horovod_has_and_we_do_not_is_told(name: str) -> None:
    with pytest.raises(AttributeError, match=f"Horovod's {name} is not in .* yet; "):
        getattr(hvd, name)
    assert not hasattr(hvd, name)  # so that scripts can ask
    trainer = Path(__file__).parents[2] / "docs" / "trainer.md"
    assert f"`{name}`" in trainer.read_text()


def test_any_other_attribute_is_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'allredcue'"):
        hvd.allredcue  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="use one of none, fp16"):
        hvd.Compression.gzip  # noqa: B018


def test_what_is_built_is_said_truly() -> None:
    assert hvd.gloo_built()
    assert not any((hvd.cuda_built(), hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()))
    assert hvd.nccl_built() == 0
    assert issubclass(ConfigError, hvd.HorovodInternalError)
