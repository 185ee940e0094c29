"""The files of deploy/, parsed, and what their expressions name."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from promql_parser import AggregateExpr, Expr, VectorSelector

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "rollyard.json"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus adds to every sample."""


def compose_text() -> str:
    """compose.yaml with each variable replaced by its default, as an empty environment would."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())


def services() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml."""
    return yaml.safe_load(compose_text())["services"]


def instructions(dockerfile: Path, name: str) -> list[str]:
    """The arguments of each instruction of this name, continued lines joined."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    return re.findall(rf"^{name}\s+(.*)$", text, re.MULTILINE)


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels; rows hold none here."""
    return json.loads(DASHBOARD.read_text())["panels"]


def expressions() -> Iterator[tuple[str, str]]:
    """Where each PromQL expression stands, and the expression with Grafana's variables filled."""
    for alert in alerts():
        yield f"alert {alert['alert']}", alert["expr"]
    for panel in panels():
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "1m")


@dataclass
class Names:
    """Metrics and labels that an expression names, and the values that it asks labels for."""

    metrics: set[str] = field(default_factory=set[str])
    labels: set[str] = field(default_factory=set[str])
    values: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    @classmethod
    def of(cls, expression: str) -> "Names":
        """Parse an expression.

        Raises:
            ValueError: it is no PromQL.
        """
        names = cls()
        promql_parser.walk(promql_parser.parse(expression), names._take)
        return names

    def _take(self, node: Expr) -> None:
        if isinstance(node, VectorSelector):
            assert node.name is not None, "a selector without a name"
            self.metrics.add(node.name)
            for matcher in node.matchers.matchers:
                self.labels.add(matcher.name)
                self.values.setdefault(matcher.name, set()).update(matcher.value.split("|"))
        elif isinstance(node, AggregateExpr) and node.modifier is not None:
            self.labels.update(node.modifier.labels)
