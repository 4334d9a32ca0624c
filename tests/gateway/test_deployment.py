"""The files of ``examples/deploy``: each by the linter of its kind, and all of them against the gateway and each other.

None of this reaches a network. What a linter that is not installed would say is skipped, with its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.config import Config
from gateway.configuration import load_config, local_engines
from gateway.replicas.discovery import Discovery
from gateway.service import Gateway
from gateway.stats.metrics import Exposition

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parent.parent.parent / "examples" / "deploy"
YAML_FILES = sorted(DEPLOY.rglob("*.yaml"))
MANIFESTS = ("gateway", "valkey", "vllm")
ENVIRONMENT = DEPLOY / "gateway.env.example"
CONFIGURATIONS = (DEPLOY / "headstart.toml", DEPLOY / "kubernetes" / "headstart.toml")
YAMLLINT = """
extends: default
rules:
  line-length: {max: 120}
  document-start: disable
  comments: {min-spaces-from-content: 1}
"""
OF_VLLM = {
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
}
OF_PROMETHEUS = {"up", "ALERTS"}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@cache
def manifests() -> list[Any]:
    return [
        document
        for name in MANIFESTS
        for document in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    ]


def of_kind(*kinds: str) -> dict[str, Any]:
    return {found["metadata"]["name"]: found for found in manifests() if found["kind"] in kinds}


@cache
def environment() -> dict[str, str]:
    lines = ENVIRONMENT.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def configured(path: Path) -> Config:
    return load_config(path, environment())


# --- each by its linter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_is_well_formed_and_even(path: Path) -> None:
    yamllint = pytest.importorskip("yamllint.linter")
    rules = pytest.importorskip("yamllint.config").YamlLintConfig(YAMLLINT)
    assert [str(problem) for problem in yamllint.run(path.read_text(), rules)] == []


def test_manifests_have_the_schema_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in manifests():
        validator.validate(manifest, desired_version="1.33", strict=True)


def test_the_compose_file_has_the_schema_of_compose() -> None:
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(load("compose.yaml"))


def test_the_dockerfile_follows_good_practice() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    told = subprocess.run([hadolint, "Dockerfile"], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


# --- the gateway's image and configuration ---------------------------------------------------------------


def test_the_image_has_the_gateway_alone_and_no_rights() -> None:
    instructions = [line.split(maxsplit=1) for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.strip()]
    by_name: dict[str, list[str]] = {}
    for name, *rest in instructions:
        by_name.setdefault(name, []).append(rest[0] if rest else "")
    assert by_name["ARG"] == ['EXTRAS=""']  # no engine, no torch
    assert by_name["USER"] == ["10001:10001"]
    assert "HEALTHCHECK" in by_name
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    sources = {source for line in by_name["COPY"] if "--from" not in line for source in line.split()[:-1]}
    root = DEPLOY.parent.parent
    for source in sources:
        assert (root / source).exists(), source
        assert f"!{source}" in ignored, source


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.parent.name)
def test_a_gateway_can_be_made_of_each_configuration(path: Path, served: Any) -> None:
    config = configured(path)
    assert local_engines(config) == 0
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)
    assert config.secret
    assert config.admin.key_sha256
    gateway = served(config)
    assert [row.problem for row in gateway.pins.report().pins] == [None]  # of a template and a tenant that there are


@pytest.fixture
def served(model_folder: Any) -> Any:
    """Makes a gateway of a configuration, without its replicas."""
    return lambda config: Gateway(config, model="assistant", folder=model_folder("chatml"), replicas=[])


# --- compose ---------------------------------------------------------------------------------------------


def test_services_know_each_other_by_the_names_and_ports_that_they_have() -> None:
    services = load("compose.yaml")["services"]
    config = configured(DEPLOY / "headstart.toml")
    assert [str(replica) for replica in config.replicas] == ["http://vllm-0:8000", "http://vllm-1:8000"]
    for name in ("vllm-0", "vllm-1"):
        assert "--port=8000" in services[name]["command"]
        assert f"--served-model-name={config.engine.served_name}" in services[name]["command"]
        assert any(volume.endswith(f":{config.engine.model}:ro") for volume in services[name]["volumes"])
    assert config.redis.url == "redis://valkey:6379/0"
    assert "valkey" in services
    gateways = [services[name] for name in ("gateway-0", "gateway-1")]
    assert [service["ports"] for service in gateways] == [["8000:8000"], ["8001:8000"]]
    for service in gateways:
        assert float(service["stop_grace_period"].removesuffix("s")) > config.server.drain_grace_s
        assert any(volume.endswith(f":{config.engine.model}:ro") for volume in service["volumes"])
        assert f"{service['env_file']}.example" == ENVIRONMENT.name


def test_what_compose_mounts_is_there() -> None:
    compose = load("compose.yaml")
    sources = [
        volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", ())
    ]
    files = [source for source in sources if source.startswith("./")]
    assert len(files) >= 7
    assert all((DEPLOY / file).is_file() for file in files)
    named = {source for source in sources if source[0] not in "./$"}
    assert named == set(compose["volumes"])
    ignored = (DEPLOY.parent.parent / ".gitignore").read_text().split()
    for secret in (compose["secrets"]["admin-key"]["file"].removeprefix("./"), "gateway.env"):
        assert f"examples/deploy/{secret}" in ignored


def test_prometheus_asks_services_that_there_are_with_the_operators_key() -> None:
    compose, prometheus = load("compose.yaml"), load("monitoring/prometheus.yaml")
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    for job in jobs.values():
        for target in job["static_configs"][0]["targets"]:
            host, port = target.split(":")
            assert host in compose["services"]
            assert port == "8000"
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert jobs["headstart"]["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    mounted = [volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"]]
    assert prometheus["rule_files"][0] in mounted
    source = load("monitoring/datasources.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load("monitoring/dashboards.yaml")["providers"]
    mounted = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert any(path.startswith(provider["options"]["path"] + "/") for path in mounted)


# --- Kubernetes ------------------------------------------------------------------------------------------


def test_services_and_budgets_select_pods_and_ports_that_there_are() -> None:
    workloads = of_kind("Deployment", "StatefulSet")
    for name, workload in workloads.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"] == labels
        service = of_kind("Service")[name]
        assert service["spec"]["selector"] == labels
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        volumes = workload["spec"]["template"]["spec"].get("volumes", [])
        claims = workload["spec"].get("volumeClaimTemplates", [])
        assert mounts == {volume["name"] for volume in volumes} | {claim["metadata"]["name"] for claim in claims}
    for name, budget in of_kind("PodDisruptionBudget").items():
        spec = workloads[name]["spec"]
        assert budget["spec"]["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert budget["spec"].get("minAvailable", 1) < spec["replicas"]  # else no node could ever be emptied
    assert set(of_kind("PodDisruptionBudget")) == {"headstart", "vllm"}
    kustomization = load("kubernetes/kustomization.yaml")
    assert kustomization["resources"] == [f"{name}.yaml" for name in MANIFESTS]
    (configuration,) = kustomization["configMapGenerator"]
    assert configuration["files"] == [CONFIGURATIONS[1].name]


def test_pods_of_the_gateway_are_probed_at_its_routes_and_have_the_time_to_drain(served: Any) -> None:
    config = configured(CONFIGURATIONS[1])
    pod = of_kind("Deployment")["headstart"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {route.path for route in create_app(served(config)).routes}
    probes = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert probes == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert set(probes.values()) <= paths
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + config.server.drain_grace_s
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod['securityContext']['runAsUser']}:" in (DEPLOY / "Dockerfile").read_text()
    (port,) = container["ports"]
    assert port["containerPort"] == config.server.port


def test_the_gateway_finds_its_replicas_and_valkey_by_their_services() -> None:
    config = configured(CONFIGURATIONS[1])
    (replica,) = config.replicas
    assert replica == "dns+http://vllm:8000"
    assert Discovery(config) is not None
    vllm = of_kind("Service")["vllm"]["spec"]
    assert vllm["clusterIP"] == "None"  # so that its name has every pod's address
    assert vllm["ports"][0]["port"] == 8000
    (container,) = of_kind("Deployment")["vllm"]["spec"]["template"]["spec"]["containers"]
    assert f"--served-model-name={config.engine.served_name}" in container["args"]
    assert of_kind("Service")["valkey"]["spec"]["ports"][0]["port"] == 6379
    assert config.redis.url == "redis://valkey:6379/0"


# --- what is watched -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed(model_folder: Any) -> set[str]:
    """The names of all series that a gateway shows, whether there is a value yet or not."""
    gateway = Gateway(Config(), model="assistant", folder=model_folder("chatml"), replicas=[])
    exposition = next(
        provide.dependency() for name, provide in create_app(gateway).dependencies.items() if name == "exposition"
    )
    assert isinstance(exposition, Exposition)
    names = set()
    for line in exposition.render().decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


@cache
def rules() -> list[Any]:
    return [rule for group in load("monitoring/alerts.yaml")["groups"] for rule in group["rules"]]


@cache
def dashboard() -> Any:
    return json.loads((DEPLOY / "monitoring" / "headstart.json").read_text())


def panels() -> list[Any]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """All PromQL there is; Grafana's variables as what they stand for."""
    yield from (rule["expr"] for rule in rules())
    written = [target["expr"] for panel in panels() for target in panel["targets"]]
    written += [annotation["expr"] for annotation in dashboard()["annotations"]["list"]]
    for text in written:
        yield re.sub(r"\$(template|tenant|replica)", ".*", re.sub(r"\$__(rate_interval|range)", "5m", text))


def test_every_series_that_is_asked_for_is_shown(exposed: set[str]) -> None:
    parser = pytest.importorskip("promql_parser")
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = exposed | recorded | OF_VLLM | OF_PROMETHEUS
    asked = set()
    for text in expressions():
        parser.parse(text)
        found = set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_]*:[a-zA-Z0-9_:]+|headstart_\w+|\bup\b|\bALERTS\b", text))
        assert found, text
        asked |= found
    assert asked - known == set()
    assert recorded <= asked, "what is recorded is used"


def test_the_pressure_alert_looks_at_six_signs_together() -> None:
    signs = {rule["labels"]["signal"]: rule["expr"] for rule in rules() if rule.get("record") == "headstart:signal"}
    told_by = {
        "few_free_blocks": "headstart_kv_blocks",
        "hit_rate_falls": "headstart:hit_rate:5m",
        "evictions_rise": "headstart_evictions_total",
        "preemptions": "headstart_preemptions_total",
        "queue_grows": "headstart_requests_waiting",
        "requests_lengthen": "headstart:tokens_per_request:15m",
    }
    assert set(signs) == set(told_by)
    assert all(series in signs[sign] and "bool" in signs[sign] for sign, series in told_by.items())
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert alerts["HeadstartUnderPressure"]["expr"] == "sum(headstart:signal) >= 3"
    for name, rule in alerts.items():
        assert {"summary", "description"} <= set(rule["annotations"]), name
        assert rule["labels"]["severity"] in ("warning", "critical"), name


def test_the_dashboard_has_each_panel_once_and_nothing_overlaps() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(?!__)(\w+)", json.dumps(dashboard())))
    assert used <= variables
