"""Placement: chunks cover the keys, loads are balanced, every process computes the same."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phub_collective.backends.base import DType, Key, layout
from phub_collective.backends.pbox.placement import cores_of, partition, place, split
from phub_collective.errors import ConfigError
from phub_collective.models import model_keys, model_names

PAPER_MODELS = [name for name in model_names() if name != "ResNext50"]  # the paper's nine

shapes = st.lists(st.integers(0, 9000).map(lambda n: (n,)), max_size=12)


def keys_of(*counts: int) -> list[Key]:
    return [Key(f"k{i}", (count,), DType.FLOAT32) for i, count in enumerate(counts)]


def heaviest(sizes: np.ndarray, owner: np.ndarray, bins: int) -> int:
    return int(np.bincount(owner, weights=sizes, minlength=bins).max(initial=0))


def best_possible(sizes: list[int], bins: int) -> int:
    """Brute force: the lowest heaviest load over all assignments."""
    assignments = itertools.product(range(bins), repeat=len(sizes))
    return min(
        max(sum(s for s, b in zip(sizes, owner, strict=True) if b == bin_) for bin_ in range(bins))
        for owner in assignments
    )


def test_chunks_never_straddle_keys() -> None:
    keys = keys_of(3, 0, 8192, 8193, 20000)
    offsets, end = layout(keys)
    chunks = split(keys, 32 << 10)
    assert [(c.key, c.nbytes) for c in chunks] == [
        (0, 12),
        (2, 32768),
        *[(3, 32768), (3, 4)],
        *[(4, 32768), (4, 32768), (4, 14464)],
    ]
    assert [c.offset for c in chunks if c.key == 4] == [offsets[4] + n * 32768 for n in range(3)]
    assert chunks[-1].offset + chunks[-1].nbytes <= end


@given(shapes=shapes, chunk_bytes=st.sampled_from([4096, 4160, 32768]))
def test_chunks_cover_every_byte_of_every_key_once(
    shapes: list[tuple[int]], chunk_bytes: int
) -> None:
    keys = [Key(f"k{i}", shape, DType.FLOAT16) for i, shape in enumerate(shapes)]
    offsets, end = layout(keys)
    covered = np.zeros(end, np.int32)
    for chunk in split(keys, chunk_bytes):
        assert 0 < chunk.nbytes <= chunk_bytes
        covered[chunk.offset : chunk.offset + chunk.nbytes] += 1
    for key, offset in zip(keys, offsets, strict=True):
        assert (covered[offset : offset + key.nbytes] == 1).all()
        covered[offset : offset + key.nbytes] = 0
    assert not covered.any(), "padding between keys belongs to no chunk"


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 60), max_size=7), bins=st.integers(1, 3))
def test_partition_keeps_the_bound(sizes: list[int], bins: int) -> None:
    array = np.array(sizes, np.int64)
    load = heaviest(array, partition(array, bins), bins)
    assert load * 3 * bins <= (4 * bins - 1) * best_possible(sizes, bins)


def test_partition_reaches_the_bound() -> None:
    """Graham's worst case, so the bound above is really the one of this rule: 11 against 9."""
    sizes = np.array([5, 5, 4, 4, 3, 3, 3])
    assert heaviest(sizes, partition(sizes, 3), 3) == 11
    assert best_possible(sizes.tolist(), 3) == 9


def test_partition_breaks_ties_by_index() -> None:
    assert partition(np.array([7, 7, 7, 7, 9]), 3).tolist() == [1, 2, 1, 2, 0]


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_paper_networks_are_balanced_over_10_lanes(name: str) -> None:
    loads = place(model_keys(name), cores=10).loads
    assert loads.max() / loads.mean() <= 1.002
    assert loads.sum() == sum(key.nbytes for key in model_keys(name))


@pytest.mark.parametrize(
    ("name", "keys", "parameters"),
    [
        ("AlexNet", 16, 50_844_008),
        ("VGG11", 22, 132_863_336),
        ("VGG19", 38, 143_667_240),
        ("GoogleNet299", 116, 10_070_552),
        ("InceptionV3", 284, 23_834_568),
        ("ResNet18", 61, 11_691_950),
        ("ResNet50", 157, 25_549_486),
        ("ResNet269", 814, 102_065_838),
        ("ResNext269", 820, 102_172_974),
    ],
)
def test_paper_networks_have_the_papers_sizes(name: str, keys: int, parameters: int) -> None:
    table = model_keys(name)
    assert (len(table), sum(key.count for key in table)) == (keys, parameters)
    assert len({key.name for key in table}) == keys


def test_an_interface_is_served_by_its_own_cores_only() -> None:
    placement = place(model_keys("ResNet18"), cores=7, interfaces=3, shards=2)
    groups = [cores_of(i, 3, 7) for i in range(3)]
    assert sorted(core for group in groups for core in group) == list(range(7))
    for interface, core in zip(placement.interface, placement.core, strict=True):
        assert core in groups[interface]
    assert set(placement.shard) == {0, 1}
    assert set(placement.core) == set(range(7))


@pytest.mark.parametrize(("interfaces", "cores"), [(4, 28), (10, 20), (2, 4)])
def test_shards_and_links_are_balanced_too(interfaces: int, cores: int) -> None:
    placement = place(model_keys("InceptionV3"), cores=cores, interfaces=interfaces, shards=4)
    sizes = np.array([chunk.nbytes for chunk in placement.chunks])
    for of in (placement.shard, placement.shard * interfaces + placement.interface):
        loads = np.bincount(of, weights=sizes)
        assert loads.max() - loads.min() <= 32 << 10


def test_fewer_cores_than_interfaces_share_a_core() -> None:
    assert [list(cores_of(i, 4, 2)) for i in range(4)] == [[0], [0], [1], [1]]
    placement = place(keys_of(*[8192] * 8), cores=2, interfaces=4)
    assert placement.loads.tolist() == [[4 << 15, 4 << 15]]


def test_loads_are_what_the_cores_own() -> None:
    placement = place(keys_of(100_000, 5, 70_000), cores=3, shards=2)
    loads = np.zeros((2, 3), np.int64)
    for chunk, shard, core in zip(placement.chunks, placement.shard, placement.core, strict=True):
        loads[shard, core] += chunk.nbytes
    assert np.array_equal(placement.loads, loads)


def test_no_keys_is_an_empty_placement() -> None:
    placement = place([], cores=4)
    assert placement.chunks == []
    assert placement.loads.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("wrong", [{"cores": 0}, {"interfaces": -1}, {"shards": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        place(keys_of(1), **wrong)


def test_the_largest_network_is_placed_quickly() -> None:
    """Registration waits for it. CPU time, since the machine may be busy with other tests."""
    keys = model_keys("VGG19")
    begin = time.process_time()
    placement = place(keys, cores=28, interfaces=10)
    assert len(placement.chunks) == 17_556
    assert time.process_time() - begin < 0.2


def test_an_unknown_network_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'LeNet'; expected one of AlexNet, VGG11"):
        model_keys("LeNet")
