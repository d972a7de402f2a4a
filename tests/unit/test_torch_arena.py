"""Views of an arena, and every way in which a gradient gets there."""

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from phub_collective.backends.base import layout
from phub_collective.errors import ConfigError
from phub_collective.torch.arena import Slot, key_of, slots_of, view
from phub_collective.torch.tensors import dense_strides


def slot_for(parameter: Any) -> Slot:
    keys = [key_of("p", parameter, 0)]
    offsets, size = layout(keys)
    return slots_of([parameter], keys, offsets, np.zeros(size, np.uint8))[0]


def backward(parameter: Any, factor: float = 1.0) -> torch.Tensor:
    """One backward pass; returns the gradient that it adds."""
    weights = factor * torch.arange(parameter.numel()).view(parameter.shape).to(parameter.dtype)
    (parameter * weights).sum().backward()
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_view_reads_and_writes_the_memory(dtype: torch.dtype) -> None:
    memory = np.zeros(256, np.uint8)
    like = torch.zeros(3, 5, dtype=dtype)
    tensor = view(memory, 64, like)
    tensor.fill_(1)
    assert tensor.shape == (3, 5)
    assert memory[:64].sum() == 0
    written = memory[64 : 64 + like.nbytes].view(np.uint8)
    assert torch.equal(torch.from_numpy(written.copy()).view(dtype), torch.ones(15, dtype=dtype))
    assert memory[64 + like.nbytes :].sum() == 0


def test_view_of_read_only_memory_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    memory = np.zeros(64, np.uint8)
    memory.flags.writeable = False
    assert view(memory, 0, torch.zeros(4)).sum() == 0
    assert not recwarn.list


def test_saving_a_view_saves_only_it() -> None:
    file = io.BytesIO()
    torch.save(view(np.zeros(1 << 20, np.uint8), 64, torch.zeros(4)), file)
    assert file.tell() < 4096


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.zeros(4, 3), ()),
        (torch.zeros(4, 3).t(), (1, 3)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.zeros(4, 6)[:, :3], ()),
        (torch.zeros(1, 3).expand(4, 3), ()),
        (torch.zeros(()), ()),
    ],
)
def test_gradients_have_the_strides_of_dense_parameters(
    tensor: torch.Tensor, strides: tuple[int, ...]
) -> None:
    assert dense_strides(tensor) == strides
    parameter: Any = torch.nn.Parameter(tensor)
    parameter.sum().backward()
    assert parameter.grad.clone().stride() == slot_for(parameter).memory.stride()


def test_stolen_gradient_is_copied_and_replaced_by_the_view() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(3, 4))
    slot = slot_for(parameter)
    expected = backward(parameter)
    slot.place(False)
    assert torch.equal(slot.memory, expected)
    assert parameter.grad.data_ptr() == slot.memory.data_ptr()


def test_view_is_accumulated_in_place_without_a_copy() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(3, 4))
    slot = slot_for(parameter)
    slot.adopt_gradient()
    version = slot.memory._version
    first, second = backward(parameter), backward(parameter, 2.0)
    slot.place(False)
    assert torch.equal(slot.memory, first + second)
    assert slot.memory._version == version + 2  # autograd's two additions


def test_create_graph_replaces_the_view_which_is_put_back() -> None:
    parameter: Any = torch.nn.Parameter(torch.ones(3))
    slot = slot_for(parameter)
    slot.adopt_gradient()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that `place` breaks
        (parameter**2).sum().backward(create_graph=True)
    assert parameter.grad.data_ptr() != slot.memory.data_ptr()
    slot.place(False)
    assert slot.memory.tolist() == [2.0, 2.0, 2.0]
    assert parameter.grad.data_ptr() == slot.memory.data_ptr()
    assert not parameter.grad.requires_grad


def test_channels_last_gradient_keeps_its_strides() -> None:
    weight = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    parameter: Any = torch.nn.Parameter(weight)
    slot = slot_for(parameter)
    expected = backward(parameter)
    slot.place(False)
    assert slot.key.strides == weight.stride()
    assert torch.equal(slot.memory, expected)
    backward(parameter)
    slot.place(False)
    assert torch.equal(slot.memory, 2 * expected)


def test_view_that_was_pointed_elsewhere_is_found_by_its_address() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(3))
    slot = slot_for(parameter)
    slot.adopt_gradient()
    parameter.grad.data = torch.full((3,), 7.0)
    slot.place(False)
    assert slot.memory.tolist() == [7.0, 7.0, 7.0]
    assert parameter.grad.data_ptr() == slot.memory.data_ptr()


def test_transposed_alias_of_the_arena_is_told_by_its_strides() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(2, 2))
    slot = slot_for(parameter)
    slot.memory.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    parameter.grad = slot.memory.t()
    slot.place(False)
    assert slot.memory.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_sparse_gradient_is_refused_or_made_dense() -> None:
    embedding: Any = torch.nn.Embedding(6, 2, sparse=True)
    slot = slot_for(embedding.weight)
    embedding(torch.tensor([1, 4, 4])).sum().backward()
    with pytest.raises(ConfigError, match="gradient of 'p' is sparse.*sparse_as_dense=True"):
        slot.place(False)
    slot.place(True)
    assert slot.memory.sum(1).tolist() == [0, 2, 0, 0, 4, 0]


def test_gradient_of_another_dtype_is_refused() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(3))
    slot = slot_for(parameter)
    parameter.data = parameter.data.double()
    backward(parameter)
    assert not slot.matches()
    with pytest.raises(ConfigError, match=r"float64 \(3,\); expected float32 \(3,\)"):
        slot.place(False)


def test_writes_after_the_push_are_counted() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(3))
    slot = slot_for(parameter)
    backward(parameter)
    slot.place(False)
    slot.mark_pushed()
    assert not slot.written_since_push()
    torch.nn.utils.clip_grad_norm_([parameter], 0.1)
    assert slot.written_since_push()
    slot.reset()
    assert not slot.written_since_push()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, dtype=torch.complex64), "'w' is complex64; expected one of float32"),
        (torch.zeros(2, device="meta"), "'w' is on meta; expected host memory"),
    ],
)
def test_parameters_that_cannot_be_exchanged(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        key_of("w", torch.nn.Parameter(tensor), 0)
