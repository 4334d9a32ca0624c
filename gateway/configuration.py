"""Where a ``Config`` comes from: defaults, a TOML file, the environment and the command line, checked before use.

Every error is a ``ConfigError`` that names the source and the key, so that a typing mistake never passes in silence.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import msgspec.inspect

from cache_policy.policy import POLICY_NAMES
from engine.models.catalog import DEFAULT_MODEL
from gateway.config import DEFAULT_TENANT, ClassConfig, Config, EngineConfig, ReplicaConfig
from gateway.errors import ConfigError, PermissionDeniedError

__all__ = [
    "DNS_PREFIX",
    "ENVIRONMENT_PREFIX",
    "TCP_PREFIX",
    "admitted_replica",
    "check_config",
    "check_replicas",
    "dns_replicas",
    "has_remote_replicas",
    "is_loopback",
    "load_config",
    "local_engines",
    "model_spec",
    "remote_replicas",
    "served_model_name",
]

ENVIRONMENT_PREFIX: Final = "HEADSTART__"

DNS_PREFIX: Final = "dns+"
"""Before a replica's URL: every address behind the host name is one."""

TCP_PREFIX: Final = "tcp://"
"""Before the address of an engine of our own (``headstart engine tcp:HOST:PORT``)."""

_SHA256_HEX: Final = re.compile(r"[0-9a-f]{64}")
_REPLICA_URL: Final = re.compile(
    r"(?P<origin>(https?|tcp)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>\d{1,5}))?)(?P<path>(/[a-z0-9._~-]*)*)",
    re.IGNORECASE,
)

_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]*")

_Tree = dict[str, Any]


def load_config(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Put the configuration together; later sources win.

    Args:
        path: A TOML file, or None for none.
        environment: Variables such as ``HEADSTART__SERVER__PORT``; others are ignored.
        overrides: Values of the command line under dotted names (``server.port``); None means not given.

    Raises:
        ConfigError: The file cannot be read, or a value cannot be used.
    """
    merged: _Tree = {}
    if path is not None:
        tree = _read_toml(path)
        _convert(tree, source=str(path), strict=True)
        _merge(merged, tree)
    if environment:
        tree = _environment_tree(environment)
        _convert(tree, source="environment", strict=False)
        _merge(merged, tree)
    if overrides:
        _merge(merged, _override_tree(overrides))
    config = _convert(merged, source="command line" if overrides else "configuration", strict=False)
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Refuse what the types allow but nobody can want.

    Raises:
        ConfigError: A key that is no SHA-256, an empty secret, an unknown policy, class or tenant, two classes of one
            priority, a replica's URL that is none, nothing that could answer, or a gateway open to the network without
            keys.
    """
    if config.secret == "":
        raise ConfigError("secret is empty: give a long random string, or leave it out and each start makes its own.")
    for digest in config.keys:
        _check_digest(digest, "keys")
    _check_classes(config)
    _check_tenants(config)
    for url in config.admin.replica_urls:
        _origin(url)
    remote_replicas(config)
    if not local_engines(config) and not has_remote_replicas(config) and not config.admin.replica_urls:
        raise ConfigError("engine.engines is 0 and there are no replicas: nothing could answer.")
    if config.admin.key_sha256 is not None:
        _check_digest(config.admin.key_sha256, "admin.key_sha256")
        if config.admin.key_sha256 in config.keys:
            raise ConfigError("admin.key_sha256 is also an entry of [keys]: the admin key must be a key of its own.")
    for key, policies in (("engine.policy", (config.engine.policy,)), ("whatif.policies", config.whatif.policies)):
        for policy in policies:
            if policy not in POLICY_NAMES:
                raise ConfigError(f"{key}: {policy!r} is unknown. Known: {', '.join(POLICY_NAMES)}.")
    if config.whatif.enabled and 1 not in config.whatif.sizes:
        raise ConfigError("whatif.sizes: 1 is missing, the real size, which the others are compared with.")
    if not config.keys and not is_loopback(config.server.host):
        raise ConfigError(
            f"server.host: {config.server.host} can be reached from other machines, but no API keys are configured. "
            "Add [keys] (`headstart hash-key` makes the entries), or listen on 127.0.0.1."
        )


def model_spec(config: EngineConfig) -> str:
    """The model as configured, else the default one."""
    return config.model or DEFAULT_MODEL


def served_model_name(config: EngineConfig) -> str:
    """The name clients use: as configured, else the model's own, which for a path is that of the folder or file."""
    if config.served_name is not None:
        return config.served_name
    spec = model_spec(config)
    path = Path(spec).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return spec


def local_engines(config: Config) -> int:
    """How many engines the gateway starts: as configured, else one, but none where there are remote replicas."""
    return config.engine.engines if config.engine.engines is not None else int(not has_remote_replicas(config))


def has_remote_replicas(config: Config) -> bool:
    """Whether remote replicas are listed or looked for."""
    return bool(config.replicas) or config.discovery.file is not None


def remote_replicas(config: Config) -> list[ReplicaConfig]:
    """The remote replicas that are listed, their URLs without ``/v1`` and slash at the end.

    Raises:
        ConfigError: A URL is none that a replica can have, or stands there twice.
    """
    return [replica for replica in check_replicas(config.replicas, dns=True) if not _is_dns(replica)]


def dns_replicas(config: Config) -> list[ReplicaConfig]:
    """The names behind which remote replicas are to be looked for. Raises ``ConfigError`` as ``remote_replicas``."""
    return [replica for replica in check_replicas(config.replicas, dns=True) if _is_dns(replica)]


def check_replicas(entries: Iterable[ReplicaConfig | str], *, dns: bool = False) -> list[ReplicaConfig]:
    """Entries as replicas with plain URLs; with ``dns`` such URLs may stand for all addresses behind a name.

    Raises:
        ConfigError: A URL is none that a replica can have, or stands there twice.
    """
    replicas: dict[str, ReplicaConfig] = {}
    for entry in entries:
        replica = ReplicaConfig(entry) if isinstance(entry, str) else entry
        url = _replica_url(replica.url, dns=dns)
        if url in replicas:
            raise ConfigError(f"replicas: {url} is given twice.")
        _check_events(replica)
        if not url.startswith(TCP_PREFIX) and not _HEADER_VALUE.fullmatch(replica.api_key or ""):
            raise ConfigError(f"replicas: the api_key of {url} has characters that no HTTP header can have.")
        replicas[url] = msgspec.structs.replace(replica, url=url)
    return list(replicas.values())


def admitted_replica(entry: ReplicaConfig, config: Config) -> ReplicaConfig:
    """A replica that somebody wants to add, with a plain URL. Scheme, host and port must be on the allow-list as one.

    Raises:
        ConfigError: It has no URL that a replica can have.
        PermissionDeniedError: It is not on the list.
    """
    (replica,) = check_replicas([entry])
    if _origin(replica.url) not in map(_origin, config.admin.replica_urls):
        raise PermissionDeniedError("This server is not on the list admin.replica_urls, so it cannot be added.")
    if replica.events is not None or replica.events_replay is not None:
        raise PermissionDeniedError("Addresses of cache events are taken from the configuration file alone.")
    return replica


def _check_events(replica: ReplicaConfig) -> None:
    if replica.url.startswith(TCP_PREFIX) and (replica.events is not None or replica.block_size is not None):
        raise ConfigError(f"replicas: {replica.url} is an engine, which tells its events and block size by itself.")
    if replica.events is None and replica.events_replay is not None:
        raise ConfigError("replicas: events_replay without events: nothing would be missed that could be asked for.")
    for name, endpoint in (("events", replica.events), ("events_replay", replica.events_replay)):
        if endpoint is not None and endpoint.startswith("tcp:") and not 0 < int(endpoint.rpartition(":")[2]) < 65536:
            raise ConfigError(f"replicas: {name} {endpoint!r} has no port that there can be.")


def _is_dns(replica: ReplicaConfig) -> bool:
    return replica.url.startswith(DNS_PREFIX)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(_replica_url(url))
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _replica_url(given: str, *, dns: bool = False) -> str:
    if "@" in given:  # not repeated: it may hold a password
        raise ConfigError("replicas: a URL holds a user name; give the server's key as api_key of [[replicas]].")
    by_name = dns and given.startswith(f"{DNS_PREFIX}http://")  # a certificate is for a name, not for its addresses
    match = _REPLICA_URL.fullmatch(given.removeprefix(DNS_PREFIX) if by_name else given)
    own = given.startswith(TCP_PREFIX)
    if match is not None and not by_name and not _is_host(match["host"]):
        match = None
    if match is None or not 0 < int(match["port"] or (0 if own else 80)) < 65536 or (own and match["path"] not in "/"):
        raise ConfigError(
            f"replicas: {given!r} is no URL of a server: give http://HOST:PORT, or tcp://HOST:PORT for an engine."
        )
    path = match["path"].rstrip("/").removesuffix("/v1").rstrip("/")
    return (DNS_PREFIX if by_name else "") + match["origin"].lower() + path


def _is_host(name: str) -> bool:
    """Whether a name, or an address, is one that can be asked for at all."""
    return all(0 < len(label) < 64 for label in name.removesuffix(".").split("."))


def is_loopback(host: str) -> bool:
    """Whether an address or host name can be reached from this machine only. An unknown name counts as open."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)  # a dual-stack socket shows 127.0.0.1 as ::ffff:127.0.0.1
    return (mapped or address).is_loopback


def _check_classes(config: Config) -> None:
    named: dict[int, str] = {}
    for name, service_class in {"default": ClassConfig(), **config.classes}.items():
        other = named.setdefault(service_class.priority, name)
        if other != name:
            raise ConfigError(
                f"classes.{name}.priority: {service_class.priority} is the priority of {other!r} already. "
                "Give each class its own."
            )
    for key in config.keys.values():
        if key.service_class != "default" and key.service_class not in config.classes:
            raise ConfigError(
                f"keys: the class {key.service_class!r} of tenant {key.tenant!r} is not defined. "
                f"Add [classes.{key.service_class}]."
            )


def _check_tenants(config: Config) -> None:
    known = {key.tenant for key in config.keys.values()} or {DEFAULT_TENANT}
    for name in config.tenants:
        if name not in known:
            raise ConfigError(f"tenants.{name}: no such tenant. There are: {', '.join(sorted(known))}.")


def _check_digest(digest: str, key: str) -> None:
    if not _SHA256_HEX.fullmatch(digest):
        # The value may be a key in plain text, put there by mistake: it is not repeated.
        raise ConfigError(f"{key}: expected a SHA-256 in 64 lower-case hex digits. `headstart hash-key` prints it.")


def _read_toml(path: Path) -> _Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _environment_tree(environment: Mapping[str, str]) -> _Tree:
    tree: _Tree = {}
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            _put(tree, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), environment[name], name)
    return tree


def _override_tree(overrides: Mapping[str, object]) -> _Tree:
    tree: _Tree = {}
    for name, value in overrides.items():
        if value is not None:
            _put(tree, name.split("."), value, name)
    return tree


def _put(tree: _Tree, path: list[str], value: object, name: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{name}: {part!r} was given a value of its own already.")
    if isinstance(tree.get(path[-1]), dict):
        raise ConfigError(f"{name}: {path[-1]!r} is a section, not a value.")
    tree[path[-1]] = value


def _merge(into: _Tree, tree: _Tree) -> None:
    for key, value in tree.items():
        present = into.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            _merge(present, value)
        else:
            into[key] = value


def _convert(tree: _Tree, *, source: str, strict: bool) -> Config:
    """``strict`` False reads numbers and booleans out of strings, which is all that an environment can hold."""
    try:
        return msgspec.convert(tree, Config, strict=strict)
    except msgspec.ValidationError as error:
        for place, key, known in _unknown_keys(tree, msgspec.inspect.type_info(Config)):
            close = difflib.get_close_matches(key, known, 1)
            advice = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}."
            raise ConfigError(
                f"{source}: {place + ': ' if place else ''}there is no setting {key!r}; {advice}"
            ) from error
        message, _, place = str(error).partition(" - at `")
        key = place.removesuffix("`").removeprefix("$").removeprefix(".")
        raise ConfigError(f"{source}: {key + ': ' if key else ''}{message}.") from error


def _unknown_keys(value: Any, kind: msgspec.inspect.Type, place: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Place and name of each key that is none of ours, with those that there are.

    Names below ``[keys]`` are left out: by mistake one may be a key in plain text.
    """
    if isinstance(kind, msgspec.inspect.UnionType):
        for member in kind.types:
            yield from _unknown_keys(value, member, place)
    elif isinstance(kind, msgspec.inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in kind.fields}
        for name, inner in value.items():
            if name not in fields:
                yield place, name, sorted(fields)
            else:
                yield from _unknown_keys(inner, fields[name], f"{place}.{name}".lstrip("."))
    elif isinstance(kind, msgspec.inspect.DictType) and isinstance(value, dict):
        for name, inner in value.items():
            yield from _unknown_keys(inner, kind.value_type, f"{place}{'[...]' if place == 'keys' else f'.{name}'}")
    elif isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType) and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown_keys(inner, kind.item_type, f"{place}[{index}]")
