"""Packed gradients: the kernels against their NumPy twins (bitwise), and the forms themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phub_collective.backends.compression import Compression, Packing
from phub_collective.errors import ConfigError
from phub_collective.kernels import packed_reference as reference

native = pytest.importorskip("phub_collective.backends.native._core").kernels

COUNTS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 100, 1000, 8192, 8193)
CHOICES = [
    Compression.of(text)
    for text in ("fp16", "bf16", "two_bit:0.7", "one_bit", "topk:0.01", "topk:0.5")
]
each_choice = pytest.mark.parametrize("compression", CHOICES, ids=str)


def at_odd_address(array: np.ndarray) -> np.ndarray:
    """A copy as bytes that begin at an odd address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.view(np.uint8)
    return memory[1:]


def packed(
    compression: Compression, residual: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's form and residual; nothing may be written behind the form."""
    form = (int(compression.packing), compression.parameter)
    size = native.packed_bytes(*form, gradient.size)
    out = np.full(size + 9, 0xA5, np.uint8)
    left = at_odd_address(residual)
    native.pack(*form, out[1 : size + 1], left, at_odd_address(gradient))
    assert out[0] == 0xA5
    assert (out[size + 1 :] == 0xA5).all()
    return out[1 : size + 1].copy(), left.copy().view(np.float32)


def folded(
    compression: Compression, acc: np.ndarray, form: np.ndarray, first: bool, pre: float
) -> tuple[bool, np.ndarray]:
    memory = at_odd_address(acc)
    which = (int(compression.packing), compression.parameter)
    good = native.fold_packed(*which, memory, at_odd_address(form), first, pre)
    return good, memory.copy().view(np.float32)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equal."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@each_choice
def test_packing_equals_its_twin_over_several_steps(compression: Compression) -> None:
    for count in COUNTS:
        random = np.random.default_rng(count)
        residual = expected = np.zeros(count, np.float32)
        for _ in range(4):
            gradient = random.standard_normal(count).astype(np.float32)
            form, residual = packed(compression, residual, gradient)
            expected_form, expected = reference.pack(compression, expected, gradient)
            assert_same(form, expected_form)
            assert_same(residual, expected)


@each_choice
@pytest.mark.parametrize("pre", [1.0, 0.3])
def test_folding_equals_its_twin(compression: Compression, pre: float) -> None:
    for count in COUNTS:
        random = np.random.default_rng(count)
        acc = np.full(count, np.nan, np.float32)  # the first form does not read it
        expected = np.zeros(count, np.float32)
        for step in range(3):
            gradient = random.standard_normal(count).astype(np.float32)
            form, _ = reference.pack(compression, np.zeros_like(gradient), gradient)
            good, acc = folded(compression, acc, form, step == 0, pre)
            assert good
            expected += reference.unpack(compression, form, count) * np.float32(pre)
            np.testing.assert_array_equal(acc, expected)


@pytest.mark.parametrize("text", ["two_bit:0.25", "one_bit", "topk:0.1"])
def test_nothing_is_lost(text: str) -> None:
    """What arrived and the residual together are the gradients' sum."""
    sender = reference.Sender(Compression.of(text), 1000, 300)
    random = np.random.default_rng(1)
    total, arrived = np.zeros(1000), np.zeros(1000)
    for _ in range(50):
        gradient = random.standard_normal(1000).astype(np.float32)
        total += gradient
        arrived += sender.arrives(gradient)
    np.testing.assert_allclose(arrived + sender.residual, total, atol=1e-3)


# --- the forms, by hand ---


def test_two_bits_are_those_of_mxnet() -> None:
    """Codes 11, 10, 00 from the upper bits of the first byte on, in words of 16 elements."""
    compression = Compression(Packing.TWO_BIT, 0.5)
    gradient = np.array([0.5, -0.5, 0.4, -0.7, 2.0], np.float32)
    form, left = packed(compression, np.zeros(5, np.float32), gradient)
    assert form.tolist() == [0b11_10_00_10, 0b11_00_00_00, 0, 0]
    rest = np.float32(-0.7) + np.float32(0.5)
    np.testing.assert_array_equal(left, [0, 0, np.float32(0.4), rest, 1.5])
    form, left = packed(compression, left, np.array([0, 0, 0.2, 0, 0], np.float32))
    assert form.tolist() == [0b00_00_11_00, 0b11_00_00_00, 0, 0]
    assert left[4] == 1.0


def test_one_bit_has_the_mean_magnitude_and_signs() -> None:
    gradient = np.array([1, -2, 0, -5], np.float32)
    form, left = packed(Compression(Packing.ONE_BIT), np.zeros(4, np.float32), gradient)
    assert form[:4].view(np.float32)[0] == 2.0
    assert form[4:].tolist() == [0b0101, 0, 0, 0]
    assert left.tolist() == [-1, 0, -2, -3]


def test_topk_sends_the_largest_and_of_equals_the_first() -> None:
    gradient = np.array([1, -3, 2, 3, -3, 0, 0, 0], np.float32)
    form, left = packed(Compression(Packing.TOPK, 0.25), np.zeros(8, np.float32), gradient)
    assert form[:8].view(np.uint32).tolist() == [1, 3]
    assert form[8:].view(np.float32).tolist() == [-3, 3]
    assert left.tolist() == [1, 0, 2, 0, -3, 0, 0, 0]


def test_a_nan_reaches_the_server_where_the_form_can_say_it() -> None:
    gradient = np.array([1.0, np.nan, 2.0, 0.0], np.float32)
    for text in ("fp16", "bf16", "one_bit", "topk:0.25"):
        compression = Compression.of(text)
        form, _ = packed(compression, np.zeros(4, np.float32), gradient)
        assert np.isnan(folded(compression, np.zeros(4, np.float32), form, True, 1.0)[1]).any()


# --- hostile forms ---


@pytest.mark.parametrize("indices", [[0, 8], [3, 3], [5, 2], [0, 0xFFFFFFFF]])
def test_elements_that_are_not_there_are_refused(indices: list[int]) -> None:
    form = np.array([*indices, 0, 0], np.uint32).view(np.uint8)
    good, _ = folded(Compression(Packing.TOPK, 0.25), np.zeros(8, np.float32), form, False, 1.0)
    assert not good


def test_any_bits_are_a_form_of_the_other_packings() -> None:
    """What no worker writes changes nothing but the sum of its own chunk."""
    random = np.random.default_rng(3)
    for compression in CHOICES[:4]:
        size = native.packed_bytes(int(compression.packing), compression.parameter, 37)
        form = random.integers(0, 256, size, dtype=np.uint8)
        assert folded(compression, np.zeros(37, np.float32), form, False, 1.0)[0]


# --- what is refused ---


def test_wrong_arguments_are_refused() -> None:
    small, large = np.zeros(4, np.uint8), np.zeros(8, np.uint8)
    two_bit = (int(Packing.TWO_BIT), 0.5)
    with pytest.raises(ConfigError, match="expected 4 bytes, got 8"):
        native.pack(*two_bit, small, large, small)
    with pytest.raises(ConfigError, match="expected 4 bytes, got 8"):
        native.fold_packed(*two_bit, small, large, True, 1.0)
    wrong: list[tuple[Any, float]] = [(0, 0.0), (3, 0.0), (3, np.nan), (5, 0.6), (6, 0.0), (-1, 0)]
    for packing, parameter in wrong:
        with pytest.raises(ConfigError, match="a packing and its parameter"):
            native.packed_bytes(packing, parameter, 1)


def test_compressions_by_their_text() -> None:
    for text in ("none", "fp16", "bf16", "two_bit:0.25", "one_bit", "topk:0.05"):
        assert str(Compression.of(text)) == text
    assert Compression.of("two_bit") == Compression(Packing.TWO_BIT, 0.5)
    assert Compression.of("topk") == Compression(Packing.TOPK, 0.01)
    for text in ("gzip", "two_bit:", "two_bit:x", ""):
        with pytest.raises(ConfigError, match=r"expected none, fp16, bf16, two_bit\[:threshold\]"):
            Compression.of(text)
    for text in ("two_bit:0", "two_bit:nan", "topk:0.6", "topk:-1", "fp16:2"):
        with pytest.raises(ConfigError, match=r"expected a \w+ from"):
            Compression.of(text)
