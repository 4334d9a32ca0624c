"""The example configuration is what it says: every setting, with its default."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from gateway.config import Config, PinConfig, ReplicaConfig, TemplateConfig
from gateway.configuration import load_config

EXAMPLE = Path(__file__).parent.parent / "headstart.example.toml"


def test_the_example_loads_and_shows_the_defaults() -> None:
    config = load_config(EXAMPLE)
    assert list(config.templates) == ["support"]
    assert msgspec.structs.replace(config, templates={}) == Config()


def test_the_example_names_every_setting() -> None:
    text = re.sub(r"^# (?=\[|\w+ = )", "", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    shown = tomllib.loads(text)
    config = msgspec.to_builtins(msgspec.convert(shown, Config))
    assert set(config) == set(shown)
    for section in (
        "server",
        "engine",
        "index",
        "discovery",
        "redis",
        "canonical",
        "admin",
        "limits",
        "trace",
        "whatif",
        "quality",
    ):
        assert set(shown[section]) == set(config[section]), section
    (template,) = shown["templates"].values()
    assert set(template) == set(TemplateConfig.__struct_fields__)
    (quality,) = config["quality"]["templates"].values()
    assert set(shown["quality"]["templates"]["support"]) == set(quality)
    (tenant,) = shown["tenants"].values()
    assert set(tenant) == {"max_cached_blocks"}
    (replica,) = shown["replicas"]
    assert set(replica) == set(ReplicaConfig.__struct_fields__)
    (pin,) = shown["pins"]
    assert set(pin) == set(PinConfig.__struct_fields__)
    (key,) = shown["keys"].values()
    assert set(key) == {"tenant", "class"}
