"""Settings: read from the environment, overridden by arguments, checked with the fix named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from phub_collective.config import Config
from phub_collective.errors import ConfigError


def test_defaults_need_no_environment() -> None:
    assert Config.from_environment({}) == Config()


def test_every_setting_has_a_variable_a_meaning_and_is_read() -> None:
    fields = dataclasses.fields(Config)
    variables = [field.metadata["variable"] for field in fields]
    assert len(set(variables)) == len(fields)
    assert all(name.startswith("PHUB_") for name in variables)
    assert all(field.metadata["meaning"] for field in fields)
    sample = {
        "lane": "tcp",
        "shards": "rank",
        "log_level": "debug",
        "chunk_bytes": "8192",
        "zmq_servers": "a:1",
    }
    for field in fields:
        text = sample.get(field.name, "7")
        config = Config.from_environment({field.metadata["variable"]: text})
        default: Any = field.default
        assert getattr(config, field.name) == type(default)(text)


def test_an_empty_variable_is_as_none() -> None:
    assert Config.from_environment({"PHUB_TIMEOUT": ""}).timeout == Config().timeout


def test_an_argument_wins_over_the_environment_unless_none() -> None:
    environ = {"PHUB_BACKEND": "ring", "PHUB_TIMEOUT": "5"}
    config = Config.from_environment(environ, backend="pbox", timeout=None)
    assert (config.backend, config.timeout) == ("pbox", 5.0)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("PHUB_TIMEOUT", "soon", "PHUB_TIMEOUT='soon': expected float"),
        ("PHUB_TIMEOUT", "-1", "expected seconds > 0"),
        ("PHUB_TIMEOUT", "nan", "expected seconds > 0"),
        ("PHUB_CHUNK_BYTES", "32K", "PHUB_CHUNK_BYTES='32K': expected int"),
        ("PHUB_CHUNK_BYTES", "1024", "multiple of 64 between 4096 and 4194304"),
        ("PHUB_CHUNK_BYTES", "4100", "multiple of 64"),
        ("PHUB_BUCKET_BYTES", "0", "expected >= 1"),
        ("PHUB_PBOX_CORES", "-1", "expected >= 0"),
        ("PHUB_ZMQ_SERVERS", "here", "expected central, sharded or HOST:PORT"),
        ("PHUB_ZMQ_SERVERS", "a:1,b", "expected central, sharded or HOST:PORT"),
        ("PHUB_LANE", "rdma", "expected auto, shm or tcp"),
        ("PHUB_SHARDS", "3", "expected host or rank"),
        ("PHUB_LOG_LEVEL", "loud", "expected debug, info, warning, error"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.from_environment({variable: text})


def test_settings_go_to_another_process() -> None:
    config = Config(lane="tcp", timeout=0.1, chunk_bytes=8192, admin_token="secret")
    assert Config.from_environment(config.to_environment()) == config
    assert Config.from_environment(Config().to_environment()) == Config()


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown settings \\['chunk'\\]"):
        Config.from_environment({}, chunk=4096)
