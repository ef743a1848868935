"""The dashboard and the alerts in deploy/ ask for nothing that GET /metrics does not have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpu_worker_pool.server.views.pool_view import STATES
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import eventually, queue, take

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"
RULES = ROOT / "deploy/prometheus-alerts.yml"
CONFIG = ROOT / "deploy/prometheus.yml"

# Prometheus puts these labels on everything it scrapes, and makes this metric itself.
TARGET_LABELS = frozenset({"job", "instance"})
OWN_METRICS: Mapping[str, Mapping[str, set[str]]] = {"up": {}}
Found = Mapping[str, Mapping[str, set[str]]]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:gpupool_\w+|up\b)(?!\w*\()", expression))


def matchers_in(expression: str) -> list[tuple[str, str, str]]:
    """Each metric, label and value that a selector of the expression names."""
    return [
        (metric, label, value)
        for metric, inside in re.findall(r"(\w+)\{([^}]*)\}", expression)
        for label, values in re.findall(r"(\w+)(?:=~|!~|!=|=)\"([^\"]*)\"", inside)
        for value in values.split("|")
    ]


def missing(expression: str, shown: str, found: Found) -> list[str]:
    """What the expression, or the text that shows its result by {{label}}, names and `found` has not."""
    known = {**found, **OWN_METRICS}
    metrics = metrics_in(expression)
    wrong = sorted(metrics - known.keys())
    labels = TARGET_LABELS.union(*(known.get(metric, {}).keys() for metric in metrics))
    for metric, label, value in matchers_in(expression):
        values = known.get(metric, {}).get(label)
        if values is None and label not in TARGET_LABELS:
            wrong.append(f"{metric}{{{label}}}")
        elif label not in TARGET_LABELS and "$" not in value and value not in (values or ()):
            wrong.append(f"{label}={value}")
    grouped = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right) \(([^)]*)\)", expression)
    named = {name for group in grouped for name in re.findall(r"\w+", group)} | shown_labels(shown)
    return wrong + sorted(named - labels)


def shown_labels(text: str) -> set[str]:
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}", text))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One whose GPUs are leased, shared, out of service and booked."""
    with ServerProcess({"SIMULATED_GPUS": "4", "GPU_POOL_NODE": "box1", "REFRESH_INTERVAL": "4"}) as server:
        assert server.ask("/admin/gpus/3/drain", "POST", body={"reason": "a fan"}).status == 200
        take(server, owner="ada")
        take(server, owner="cleo", memory_mb=1000)
        queue(server, owner="bob", gpus=3)
        span = {"starts_at": "2100-01-01", "ends_at": "2100-01-02"}
        assert server.ask("/bookings/course", "PUT", body={**span, "owner": "dora"}).status == 200
        assert server.ask("/quotas/ada", "PUT", body={"gpus": 2}).status == 200
        yield server


def scrape(server: ServerProcess) -> list[Metric]:
    return list(text_string_to_metric_families(server.ask("/metrics").body.decode()))


@pytest.fixture(scope="module")
def families(server: ServerProcess) -> list[Metric]:
    return scrape(server)


@pytest.fixture(scope="module")
def found(families: list[Metric]) -> Found:
    """Of each metric of the server its labels, and the values of these."""
    metrics: dict[str, dict[str, set[str]]] = {}
    for family in families:
        for sample in family.samples:
            labels = metrics.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return metrics


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Every expression, and how its result is shown; those of the variables too."""
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = [(target["expr"], target["legendFormat"]) for target in targets]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert selector is not None, variable
            asked.append((selector[1], f"{{{{{selector[2]}}}}}"))
    return asked


# --- the metrics -----------------------------------------------------------------------------------------------------


def test_every_gpu_is_in_the_state_that_the_pool_shows(server: ServerProcess) -> None:
    def shown() -> dict[tuple[str, str, str], str]:
        return {(gpu["node"], str(gpu["gpu_id"]), gpu["uuid"]): gpu["state"] for gpu in server.json("/pool")["gpus"]}

    def scraped() -> tuple[list[Sample], dict[tuple[str, str, str], str]] | None:
        """With what was shown before and after, where that was the same: one that is being written is unknown."""
        before, families, after = shown(), scrape(server), shown()
        samples = next(family.samples for family in families if family.name == "gpupool_gpu_state")
        return (samples, after) if before == after and "unknown" not in after.values() else None

    samples, there = eventually(scraped, "a quiet moment")
    states: dict[tuple[str, str, str], dict[str, float]] = {}
    for sample in samples:
        place = (sample.labels["node"], sample.labels["gpu"], sample.labels["uuid"])
        states.setdefault(place, {})[sample.labels["state"]] = sample.value
    assert states == {place: {each: float(each == state) for each in STATES} for place, state in there.items()}
    # No lease here has lasted for long, so the booking keeps its GPU from no request yet.
    assert sorted(there.values()) == ["free", "leased", "out_of_service", "shared"]


def test_from_when_a_reading_is_stale(families: list[Metric]) -> None:
    samples = next(family.samples for family in families if family.name == "gpupool_reading_stale_after_seconds")
    assert [sample.value for sample in samples] == [12.0]


def test_leases_by_their_terms_and_owners_beside_their_quotas(server: ServerProcess, families: list[Metric]) -> None:
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        if re.search("leases_(idle|warned|preemptible|expected)|owner|quota", family.name)
        for sample in family.samples
    }
    share = values.pop(("gpupool_owner_gpus", "cleo"))
    assert 0 < share < 0.1
    assert values == {
        ("gpupool_leases_idle",): 0,
        ("gpupool_leases_warned",): 0,
        ("gpupool_leases_preemptible",): 0,
        ("gpupool_leases_expected", "declared"): 0,
        ("gpupool_leases_expected", "predicted"): 0,
        ("gpupool_leases_expected", "unknown"): 1,
        ("gpupool_owner_gpus", "ada"): 1,
        ("gpupool_quota_gpus", "ada"): 2,
    }


# --- the names -------------------------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_is_there(dashboard: dict[str, Any], found: Found) -> None:
    wrong = {expression: missing(expression, shown, found) for expression, shown in queries(dashboard)}
    assert {expression: names for expression, names in wrong.items() if names} == {}


def test_the_alerts_ask_for_what_is_there(alerts: list[dict[str, Any]], found: Found) -> None:
    wrong = {rule["alert"]: missing(rule["expr"], " ".join(rule["annotations"].values()), found) for rule in alerts}
    assert {alert: names for alert, names in wrong.items() if names} == {}


def test_every_metric_of_the_server_is_on_the_dashboard(dashboard: dict[str, Any], found: Found) -> None:
    asked = {metric for expression, _ in queries(dashboard) for metric in metrics_in(expression)}
    assert {name for name in found if not re.search(r"_(created|sum|count)$", name)} <= asked


# --- the files -------------------------------------------------------------------------------------------------------


def test_the_dashboard_can_be_loaded_anywhere(dashboard: dict[str, Any]) -> None:
    """Whatever the Prometheus is called there, and whatever else is there."""
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    assert dashboard["id"] is None
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["targets"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        for target in panel["targets"]:
            assert target["expr"].strip()
            used = {name for name in re.findall(r"\$\{?(\w+)", target["expr"]) if not name.startswith("__")}
            assert used <= variables


def test_an_alert_says_what_is_wrong_and_what_to_do(alerts: list[dict[str, Any]]) -> None:
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["for"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert len(rule["annotations"]["description"]) > 80


def test_every_alert_is_described_and_tried(alerts: list[dict[str, Any]]) -> None:
    names = {rule["alert"] for rule in alerts}
    for path in ("docs/how-to/monitor.md", "tests/prometheus-alerts-test.yml"):
        assert set(re.findall(r"\bGpuPool[A-Z]\w+", (ROOT / path).read_text(encoding="utf-8"))) == names


def test_the_example_loads_the_alerts_under_the_name_they_expect(
    alerts: list[dict[str, Any]], dashboard: dict[str, Any]
) -> None:
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert [(CONFIG.parent / name).resolve() for name in config["rule_files"]] == [RULES]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    expressions = [rule["expr"] for rule in alerts] + [expression for expression, _ in queries(dashboard)]
    assert {value for text in expressions for _, label, value in matchers_in(text) if label == "job"} == jobs


# --- what Prometheus itself says -------------------------------------------------------------------------------------


def promtool(*arguments: str | Path, given: bytes = b"") -> None:
    """Have it look at files, or at what it is given; what it complains of is an error."""
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    done = subprocess.run([command, *arguments], input=given, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_promtool_takes_the_metrics(server: ServerProcess) -> None:
    promtool("check", "metrics", given=server.ask("/metrics").body)


def test_promtool_takes_the_example_and_its_alerts() -> None:
    promtool("check", "config", CONFIG)


def test_promtool_sees_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", ROOT / "tests/prometheus-alerts-test.yml")


def test_promtool_takes_every_expression_of_the_dashboard(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__\w+", "5m", expression)}
        for number, (expression, _) in enumerate(queries(dashboard))
    ]
    path = tmp_path / "dashboard.yml"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", path)
