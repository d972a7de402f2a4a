"""What the exchange benchmark says about memory: arrays, peaks, huge pages, and the floor."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from phub_collective.bench import bandwidth, hugepages
from phub_collective.bench.memory import PeakMeter, held, settle
from phub_collective.errors import ConfigError


@contextlib.contextmanager
def memory_file(nbytes: int) -> Iterator[int]:
    """A descriptor of shared memory."""
    file = os.memfd_create("bench-test")
    try:
        os.ftruncate(file, nbytes)
        yield file
    finally:
        os.close(file)


class TestMemory:
    def test_private_arrays_and_shared_ones_are_told_apart(self) -> None:
        private = np.ones(5 << 20, np.uint8)
        with memory_file(8 << 20) as file:
            shared = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        found = held([private[: 4 << 20], private[4 << 20 :], shared[: 2 << 20]])
        assert (found.private, found.shared) == (5 << 20, 2 << 20)
        assert 0 <= found.huge <= 7 << 20

    def test_the_peak_is_seen_after_it_is_gone(self) -> None:
        seen = threading.Event()

        class Watched(PeakMeter):
            def _sample(self) -> None:
                super()._sample()
                if self.worker > 60 << 20:
                    seen.set()

        with Watched([os.getpid()]) as meter:
            passing = np.ones(64 << 20, np.uint8)
            assert seen.wait(20)
            del passing
        assert 60 << 20 < meter.worker < 90 << 20
        assert meter.server is None

    def test_what_is_shared_with_a_server_is_the_servers_and_counted_once(self) -> None:
        server = subprocess.Popen(
            [sys.executable, "-c", "import sys; print(flush=True); input();"
             "x = b'1' * (16 << 20); print(flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with server, memory_file(32 << 20) as file:
            assert server.stdout is not None
            assert server.stdin is not None
            server.stdout.readline()
            settle()  # else the array may come from memory that is ours already
            with PeakMeter([os.getpid()], [server.pid]) as meter:
                shared = np.frombuffer(mmap.mmap(file, 0), np.uint8)
                shared.fill(1)
                private = np.ones(8 << 20, np.uint8)
                print(file=server.stdin, flush=True)
                server.stdout.readline()
            assert private.size
            server.stdin.close()
        assert meter.server is not None
        assert abs(meter.server - (48 << 20)) < 4 << 20
        assert abs(meter.worker - (8 << 20)) < 4 << 20

    def test_a_process_that_is_gone_holds_nothing(self) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        with PeakMeter([gone.pid]) as meter:
            pass
        assert meter.worker == 0


class TestHugePages:
    def test_the_setting_is_put_back_whatever_happens(self, tmp_path: Path) -> None:
        setting = tmp_path / "shmem_enabled"
        setting.write_text("always within_size advise [never] deny force\n")

        def fail() -> None:
            with hugepages.allowed(setting):
                assert setting.read_text() == "advise"
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert setting.read_text() == "never"

    def test_without_the_setting_the_fix_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="run as root"), hugepages.allowed(tmp_path / "none"):
            pass


class TestFloor:
    def test_bytes_that_must_move(self) -> None:
        least = bandwidth.least_bytes
        assert least("allreduce", "shm", 4, 100) == least("allreduce-arena", "shm", 4, 100) == 800
        assert least("server-optimizer", "shm", 4, 100) == 1200
        assert least("shared-model", "shm", 4, 100) == 800
        assert least("allreduce", "tcp", 4, 100) == 2400

    def test_the_slowest_rank_of_the_best_repeat_counts(self) -> None:
        moved = 2 * 2 * bandwidth.WALK_BYTES * bandwidth.WALKS
        assert bandwidth.bandwidth([[1.0, 3.0], [5.0, 4.0], []]) == moved / 4.0

    def test_there_is_none_within_the_cache(self) -> None:
        edge = bandwidth.CACHES * bandwidth.last_level_cache() // 2
        assert bandwidth.floor_seconds("allreduce", "shm", 2, edge - 1, 1e9) is None
        floor = bandwidth.floor_seconds("allreduce", "shm", 2, edge, 1e9)
        assert floor == pytest.approx(4 * edge / 1e9)
