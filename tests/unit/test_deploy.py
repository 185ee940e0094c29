"""What deploy/ names exists, and fits together: files, commands, settings, ports, permissions."""

import ast
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose
from deployment import (
    COMPOSE,
    DEPLOY,
    DOCKERFILES,
    ROOT,
    alerts,
    compose_text,
    instructions,
    panels,
    services,
)
from pydantic_settings import BaseSettings

from rollyard_sandbox.jail import tree_policy
from rollyard_sandbox.settings import WorkerSettings
from rollyard_service.settings import GatewaySettings

SETTINGS: dict[str, type[BaseSettings]] = {"gateway": GatewaySettings, "worker": WorkerSettings}
SECCOMP = DEPLOY / "compose" / "worker-seccomp.json"


def test_compose_is_valid() -> None:
    parsed = PyCompose.from_yaml(compose_text())
    parsed.validate()
    assert set(parsed.service_names()) == set(services())
    with pytest.raises(ValueError, match="tmpfz"):
        PyCompose.from_yaml(compose_text().replace("tmpfs:", "tmpfz:", 1))


def test_compose_names_files_that_are_there() -> None:
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), volume
        if build := service.get("build"):
            context = (COMPOSE.parent / build["context"]).resolve()
            assert context == ROOT
            assert (context / build["dockerfile"]).is_file(), name
    for secret in yaml.safe_load(compose_text())["secrets"].values():
        assert secret["file"].removeprefix("./") in COMPOSE.read_text().split("name: rollyard")[0]


def test_every_variable_is_a_setting() -> None:
    for name, settings in SETTINGS.items():
        given = {
            variable.removeprefix("ROLLYARD_").lower(): value
            for variable, value in services()[name]["environment"].items()
            if variable.startswith("ROLLYARD_")
        }
        assert set(given) <= set(settings.model_fields), name
        for field in ("api_keys_file",):
            given.pop(field, None)
        if name == "gateway":
            given["api_keys"] = "a key"
        settings(**given)  # values fit
    for unit in (DEPLOY / "systemd").glob("*.service"):
        known = {
            f"ROLLYARD_{field}".upper() for cls in SETTINGS.values() for field in cls.model_fields
        }
        named = set(re.findall(r"ROLLYARD_[A-Z_]+", unit.read_text()))
        assert named <= known, unit


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(dockerfile: Path) -> None:
    hadolint = Path(sys.prefix) / "bin" / "hadolint"
    linted = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    copied = [
        word
        for line in instructions(dockerfile, "COPY")
        if not line.startswith("--from")
        for word in line.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    # What the wheel is built of is all there, and not kept away by the ignore file.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "pyproject.toml"]
    needed += [project["project"]["readme"], *project["project"]["license-files"]]
    ignored = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().split()
    for path in needed:
        top = Path(path).parts[0]
        assert top in copied
        assert f"!{top}" in ignored
    for link in (path for source in copied for path in (ROOT / source).rglob("*")):
        if link.is_symlink():
            target = link.resolve().relative_to(ROOT)
            assert any(target.is_relative_to(source) for source in copied), link
    [extra] = re.findall(r"'\.\[(\w+)\]'", dockerfile.read_text())
    assert extra in project["project"]["optional-dependencies"]
    _, command = json.loads(instructions(dockerfile, "ENTRYPOINT")[0])
    helped = subprocess.run(
        [sys.executable, "-m", "rollyard.cli", command, "--help"], capture_output=True, text=True
    )
    assert helped.returncode == 0
    assert command in dockerfile.name


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("service", ["service/rollyard_service", "service/rollyard_queue"]),
        ("sandbox", ["sandbox/rollyard_sandbox", "service/rollyard_queue"]),
    ],
)
def test_an_extra_brings_what_its_packages_import(extra: str, packages: list[str]) -> None:
    """An image has its own extra alone: what another one brings is not there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"][extra]]
    brought = {re.split(r"[\[<>=~ ;]", line)[0].lower() for line in named}
    brought |= {"starlette", "hiredis"}  # of fastapi and redis[hiredis], for certain
    distributions = importlib.metadata.packages_distributions()
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        if path.parent.name == "site":
            continue  # runs in jails, with the image's libraries
        for name in _imported(path):
            if name not in sys.stdlib_module_names and not name.startswith("rollyard"):
                from_where = {one.lower().replace("_", "-") for one in distributions[name]}
                assert brought & from_where, (path.name, name)


def _imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    return found


def test_commands_of_the_images_exist() -> None:
    for dockerfile in DOCKERFILES:
        for line in instructions(dockerfile, "RUN"):
            for module in re.findall(r"python -m (rollyard\w*(?:\.\w+)*)", line):
                assert importlib.util.find_spec(module), module
            for code in re.findall(r"python -c '([^']+)'", line):
                _imports_exist(code)
    for service in services().values():
        test = service.get("healthcheck", {}).get("test", [])
        if "-c" in test:
            _imports_exist(test[-1])


def _imports_exist(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names), code


def test_ports_agree() -> None:
    gateway, worker = (services()[name] for name in ("gateway", "worker"))
    ports = {
        "gateway": gateway["environment"]["ROLLYARD_PORT"],
        "worker": worker["environment"]["ROLLYARD_METRICS_PORT"],
    }
    for name, port in ports.items():
        assert [port] == instructions(DEPLOY / "docker" / f"{name}.Dockerfile", "EXPOSE")
        assert f"127.0.0.1:{port}/" in services()[name]["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    for job in scraped["scrape_configs"]:
        [found] = job["dns_sd_configs"]
        [name] = found["names"]
        assert job["job_name"] == f"rollyard-{name}"
        assert str(found["port"]) == ports[name]
    assert f"gateway:{ports['gateway']} " in (DEPLOY / "compose" / "haproxy.cfg").read_text()


def test_only_prometheus_and_the_front_are_reached_by_the_queue_s_network() -> None:
    """Workers run what models write: their network leads nowhere."""
    compose = yaml.safe_load(compose_text())
    assert compose["networks"]["queue"]["internal"] is True
    assert services()["worker"]["networks"] == ["queue"]
    for service in services().values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_the_worker_has_what_deploy_s_readme_says_and_no_more() -> None:
    worker = services()["worker"]
    _, _, told_at = (DEPLOY / "README.md").read_text().partition("container needs, and why")
    told = set(re.findall(r"^\| `([^`]+)` \|", told_at, re.MULTILINE))
    options = {*worker["cap_add"], *worker["security_opt"], f"cgroup: {worker['cgroup']}"}
    options |= {f"oom_score_adj: {worker['oom_score_adj']}", "read_only: true"}
    assert told == options
    for name, service in services().items():
        assert "privileged" not in service
        assert service.get("pid") != "host"
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "docker.sock" not in str(service)


def test_the_container_s_filter_refuses_what_the_jails_refuse() -> None:
    profile = json.loads(SECCOMP.read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    text = re.sub(r"//.*", "", tree_policy())
    for names in re.findall(r"ERRNO\(\d+\) \{([^}]*)\}", text):
        assert {name.strip() for name in names.split(",")} <= refused
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert all(rule["action"] == "SCMP_ACT_ERRNO" for rule in profile["syscalls"])


def test_every_alert_says_what_to_do() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names) > 10
    for alert in alerts():
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["action"]


def test_the_dashboard_s_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        place = set(itertools.product(columns, rows))
        assert not place & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= place
    assert len({panel["id"] for panel in panels()}) == len(panels())
