"""Every setting: its PHUB_* variable, default and meaning. An explicit argument wins over the
environment; the environment is read once, in `Config.from_environment`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phub_collective.errors import ConfigError

ZMQ_PLACES = ("central", "sharded")


def _setting(default: Any, variable: str, meaning: str) -> Any:
    return field(default=default, metadata={"variable": variable, "meaning": meaning})


@dataclass(frozen=True)
class Config:
    """All settings of one process; `phub config` prints them."""

    backend: str = _setting("auto", "PHUB_BACKEND", "auto | NAME | ^NAME,... | rules by size")
    lane: str = _setting("auto", "PHUB_LANE", "transport of lanes: auto | shm | tcp")
    pbox: str = _setting(
        "",
        "PHUB_PBOX",
        "HOST:PORT of a running PBox, or of its shards, HOST:PORT,...; empty: one is started",
    )
    pbox_cores: int = _setting(
        0,
        "PHUB_PBOX_CORES",
        "cores of a server we start; 0: one per CPU, at most 8, and one for a shard of pshard",
    )
    shards: str = _setting(
        "host", "PHUB_SHARDS", "pshard starts a shard on every host, or for every rank: host | rank"
    )
    job: str = _setting("", "PHUB_JOB", "name of the job (namespace) on the PBox")
    token: str = _setting(
        "", "PHUB_TOKEN", "job token, TOKEN,... of shards, to join a job made by someone else"
    )
    admin_token: str = _setting(
        "", "PHUB_ADMIN_TOKEN", "what creating a job on a PBox proves; needed beyond loopback"
    )
    zmq_servers: str = _setting(
        "sharded",
        "PHUB_ZMQ_SERVERS",
        "servers of zmq_ps: central (on rank 0's host) | sharded (on every host) | HOST:PORT,...",
    )
    chunk_bytes: int = _setting(32 << 10, "PHUB_CHUNK_BYTES", "bytes of a chunk (4 KiB .. 4 MiB)")
    bucket_bytes: int = _setting(25 << 20, "PHUB_BUCKET_BYTES", "bytes of a gradient bucket")
    timeout: float = _setting(
        30.0, "PHUB_TIMEOUT", "seconds of silence of a lost peer before an error"
    )
    start_timeout: float = _setting(
        120.0, "PHUB_START_TIMEOUT", "seconds until all ranks must have called init"
    )
    stall_warning: float = _setting(
        60.0, "PHUB_STALL_WARNING", "seconds until a stalled operation is reported"
    )
    stall_timeout: float = _setting(
        600.0, "PHUB_STALL_TIMEOUT", "seconds until a stalled operation is an error"
    )
    congestion: str = _setting(
        "",
        "PHUB_TCP_CONGESTION",
        "TCP congestion control of lanes; empty: cubic, reno or the system's",
    )
    socket_buffer: int = _setting(
        0, "PHUB_TCP_BUFFER", "bytes of a lane's socket buffers; 0: the kernel tunes them"
    )
    spin_us: int = _setting(
        0, "PHUB_SPIN_US", "microseconds to spin before sleeping (never when oversubscribed)"
    )
    log_level: str = _setting("warning", "PHUB_LOG_LEVEL", "debug | info | warning | error")

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Read PHUB_* variables; `overrides` that are not None win.

        Raises:
            ConfigError: a value does not parse, or is out of its range.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for item in dataclasses.fields(Config):
            variable = item.metadata["variable"]
            text = environ.get(variable)
            if text is not None and text != "":
                kind: Any = type(item.default)
                try:
                    values[item.name] = kind(text)
                except ValueError:
                    raise ConfigError(
                        f"[config] {variable}={text!r}: expected {kind.__name__} "
                        f"({item.metadata['meaning']})"
                    ) from None
        unknown = overrides.keys() - {item.name for item in dataclasses.fields(Config)}
        if unknown:
            raise ConfigError(f"[config] unknown settings {sorted(unknown)}")
        values.update({name: value for name, value in overrides.items() if value is not None})
        config = Config(**values)
        config.check()
        return config

    def to_environment(self) -> dict[str, str]:
        """The variables from which another process reads the same settings."""
        return {
            item.metadata["variable"]: str(getattr(self, item.name))
            for item in dataclasses.fields(Config)
        }

    def check(self) -> None:
        """Raise ConfigError when a value is out of its range."""
        if self.lane not in ("auto", "shm", "tcp"):
            raise ConfigError(f"[config] PHUB_LANE={self.lane!r}: expected auto, shm or tcp")
        if self.shards not in ("host", "rank"):
            raise ConfigError(f"[config] PHUB_SHARDS={self.shards!r}: expected host or rank")
        if not 4 << 10 <= self.chunk_bytes <= 4 << 20 or self.chunk_bytes % 64:
            raise ConfigError(
                f"[config] PHUB_CHUNK_BYTES={self.chunk_bytes}: expected a multiple of 64 "
                "between 4096 and 4194304"
            )
        named = self.zmq_servers.split(",")
        if self.zmq_servers not in ZMQ_PLACES and not all(map(_is_address, named)):
            raise ConfigError(
                f"[config] PHUB_ZMQ_SERVERS={self.zmq_servers!r}: expected central, sharded or "
                "HOST:PORT,..."
            )
        for name in ("timeout", "start_timeout", "stall_warning", "stall_timeout"):
            if not getattr(self, name) > 0:  # catches NaN too
                raise ConfigError(f"[config] {name}={getattr(self, name)}: expected seconds > 0")
        for name, least in (("bucket_bytes", 1), ("pbox_cores", 0), ("socket_buffer", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"[config] {name}={getattr(self, name)}: expected >= {least}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"[config] PHUB_LOG_LEVEL={self.log_level!r}: expected debug, info, warning, error"
            )


def _is_address(text: str) -> bool:
    host, _, port = text.strip().rpartition(":")
    return bool(host) and port.isdecimal()
