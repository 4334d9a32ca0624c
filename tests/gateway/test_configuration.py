"""Where configuration values come from, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ApiKey, ClassConfig, Config, EngineConfig, ReplicaConfig, ServerConfig, TenantConfig
from gateway.configuration import check_config, is_loopback, load_config, local_engines, remote_replicas
from gateway.errors import ConfigError

_DIGEST = hashlib.sha256(b"key").hexdigest()


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headstart.toml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    path = _file(tmp_path, "[server]\nport = 1\nhost = '127.0.0.2'\nlog_level = 'debug'\n")
    config = load_config(path, {"HEADSTART__SERVER__PORT": "2", "HEADSTART__SERVER__HOST": "127.0.0.3"})
    assert config.server == ServerConfig(host="127.0.0.3", port=2, log_level="debug")
    config = load_config(path, {"HEADSTART__SERVER__PORT": "2"}, {"server.port": 3, "server.host": None})
    assert config.server == ServerConfig(host="127.0.0.2", port=3, log_level="debug")


def test_templates_and_keys_are_read_from_the_file(tmp_path: Path) -> None:
    text = f"[templates.faq]\nsystem = 'Today is {{now}}.'\n[keys]\n{_DIGEST} = {{tenant = 'a', class = 'batch'}}\n"
    text += "[classes.batch]\npriority = 2\nmax_running = 4\n"
    config = load_config(_file(tmp_path, text))
    assert config.classes["batch"] == ClassConfig(priority=2, max_running=4)
    assert config.templates["faq"].system == "Today is {now}."
    assert config.keys[_DIGEST].service_class == "batch"


def test_the_environment_reads_numbers_and_booleans_from_text() -> None:
    environment = {
        "HEADSTART__CANONICAL__TEXT": "false",
        "HEADSTART__REDIS__FLUSH_INTERVAL_S": "0.5",
        "HEADSTART__SECRET": "12345",
        "HOME": "/x",
    }
    config = load_config(None, environment)
    assert (config.canonical.text, config.redis.flush_interval_s, config.secret) == (False, 0.5, "12345")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1\n", "prot"),
        ("[serve]\nport = 1\n", "serve"),
        ("[server]\nprot = 8000\n", "server: there is no setting 'prot'; did you mean port?"),
        ("[templates.faq]\nsystm = 'x'\n", "templates.faq: there is no setting 'systm'; did you mean system?"),
        ("[[replicas]]\nulr = 'http://a'\n", "replicas[0]: there is no setting 'ulr'; did you mean url?"),
        ("[tenants.a]\nquota = 1\n", "tenants.a: there is no setting 'quota'; there are: max_cached_blocks."),
        ("[keys]\nsk-plain = {tennant = 'a'}\n", "keys[...]: there is no setting 'tennant'; did you mean tenant?"),
        ("[server]\nport = '8000'\n", "server.port"),
        ("[server]\nport = 70000\n", "server.port"),
        ("[canonical]\norder = 'random'\n", "canonical.order"),
        ("[engine]\npolicy = 'random'\n", "engine.policy"),
        ("[keys]\nsk-plain = {tenant = 'a'}\n", "keys"),
        ("[admin]\nkey_sha256 = 'sk-plain'\n", "admin.key_sha256"),
        (f"[admin]\nkey_sha256 = '{_DIGEST}'\n[keys]\n{_DIGEST} = {{tenant = 'a'}}\n", "admin.key_sha256"),
        ("secret = ''\n", "secret"),
        ("[tenants.default]\nmax_cached_blocks = -1\n", "max_cached_blocks"),
        ("[tenants.acme]\nmax_cached_blocks = 8\n", "tenants.acme"),
        ("[server\n", "headstart.toml"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_file(tmp_path, text))
    assert named in caught.value.message
    assert "sk-plain" not in caught.value.message


@pytest.mark.parametrize(
    "environment",
    [
        {"HEADSTART__SERVER__PROT": "1"},
        {"HEADSTART__SERVER__PORT": "many"},
        {"HEADSTART__SERVER": "x"},
        {"HEADSTART__SECRET__X": "1", "HEADSTART__SECRET": "x"},
    ],
)
def test_a_mistake_in_the_environment_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        load_config(None, environment)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_without_keys_only_loopback_is_bound(host: str) -> None:
    with pytest.raises(ConfigError, match="keys"):
        check_config(Config(server=ServerConfig(host=host)))
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
def test_loopback_is_recognised(host: str) -> None:
    check_config(Config(server=ServerConfig(host=host)))


def test_with_keys_any_address_may_be_bound() -> None:
    load_config(None, {"HEADSTART__SERVER__HOST": "0.0.0.0", f"HEADSTART__KEYS__{_DIGEST.upper()}__TENANT": "a"})


def test_classes_are_defined_before_keys_name_them_and_have_a_priority_each() -> None:
    owner = {_DIGEST: ApiKey("acme", "batch")}
    check_config(Config(keys=owner, classes={"batch": ClassConfig(1), "urgent": ClassConfig(2, max_running=3)}))
    check_config(Config(classes={"default": ClassConfig(5), "urgent": ClassConfig(0)}))
    with pytest.raises(ConfigError, match=r"\[classes\.batch\]"):
        check_config(Config(keys=owner))
    for classes in ({"batch": ClassConfig(0)}, {"batch": ClassConfig(3), "nightly": ClassConfig(3)}):
        with pytest.raises(ConfigError, match="priority"):
            check_config(Config(classes=classes))


def test_a_quota_is_for_a_tenant_that_there_is() -> None:
    quota = TenantConfig(max_cached_blocks=64)
    check_config(Config(tenants={"default": quota}))
    check_config(Config(keys={_DIGEST: ApiKey("acme")}, tenants={"acme": quota}))
    with pytest.raises(ConfigError, match="There are: acme"):
        check_config(Config(keys={_DIGEST: ApiKey("acme")}, tenants={"default": quota}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"events": "tcp://{host}:99999"}, "no port"),
        ({"events": "tcp://{host}:5557", "events_replay": "tcp://{host}:0"}, "events_replay"),
        ({"events_replay": "tcp://{host}:5558"}, "without events"),
    ],
)
def test_addresses_of_cache_events_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(Config(replicas=(ReplicaConfig("http://10.0.0.1:8000", **settings),)))


def test_replicas_are_urls_or_tables_and_their_urls_have_one_form(tmp_path: Path) -> None:
    path = _file(tmp_path, 'replicas = ["http://A.example:8001/v1/", "https://b.example/vllm/v1", "http://[::1]:9"]')
    config = load_config(path)
    urls = ["http://a.example:8001", "https://b.example/vllm", "http://[::1]:9"]
    assert [replica.url for replica in remote_replicas(config)] == urls
    path = _file(tmp_path, "[[replicas]]\nurl = 'http://a:1'\nmodel = 'm'\napi_key = 'k'\nidle_timeout_s = 5\n")
    assert remote_replicas(load_config(path)) == [ReplicaConfig("http://a:1", "m", "k", 5.0)]
    config = load_config(path, overrides={"replicas": ("http://b:2",)})
    assert remote_replicas(config) == [ReplicaConfig("http://b:2")]


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:8000", "ftp://a", "file:///etc/passwd", "http://", "http:///v1", "http://a:0", "http://a:70000",
        "http://a b", "http://a/?x=1", "http://a/#x", "http://a\\b", "http://a:1:2", "unix:/tmp/x", "http://a\n.b",
        "http://user:hunter2@a", "http://a..b", "https://.a:1", f"http://{'a' * 64}.b", "tcp://a..b:7001",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_server_is_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match="replicas") as caught:
        check_config(Config(replicas=(url,)))
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("key", ["hunter2\nx: y", "hunter2\0", "hunter2é", "hunter2…"])
def test_a_key_that_no_header_can_hold_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        check_config(Config(replicas=(ReplicaConfig("http://a:1", api_key=key),)))
    assert "hunter2" not in caught.value.message
    check_config(Config(replicas=(ReplicaConfig("tcp://a:1", api_key=key), ReplicaConfig("http://a:1", api_key="k !"))))


def test_a_server_is_named_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        check_config(Config(replicas=("http://a:1", ReplicaConfig("http://A:1/v1"))))


def test_engines_run_unless_other_servers_answer() -> None:
    assert local_engines(Config()) == 1
    assert local_engines(Config(replicas=("http://a:1",))) == 0
    assert local_engines(Config(engine=EngineConfig(engines=2), replicas=("http://a:1",))) == 2
    with pytest.raises(ConfigError, match="nothing could answer"):
        check_config(Config(engine=EngineConfig(engines=0)))
