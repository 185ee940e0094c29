"""A load test's description: which programs, in which mix, arriving how. One TOML file each.

    scenario = load("math-rollout")       # of the package
    scenario = load("./mine.toml")        # a file; or a .jsonl of programs
    work = next(scenario.works(seed="1"))

``rollyard bench list`` names those of the package, ``rollyard bench show NAME`` prints one.
"""

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollyard_loadtest.listed import ListError, read_works
from rollyard_loadtest.load import AnyLoad, Closed, Load, Poisson
from rollyard_loadtest.workload import AnyKind, Listed, Work, works

SCHEMA = 1
"""Version of the TOML files; a newer one is refused."""
_PACKAGED = Path(__file__).with_name("scenarios")


class ScenarioError(ValueError):
    """A scenario that cannot be used; the message says where, and what would be right."""


class Sweep(BaseModel):
    """One stage of load for each value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameter: Literal["in_flight", "rate_per_s", "of_capacity"]
    """``of_capacity``: multiples of what the service does at ``capacity_in_flight``, measured
    first; needs ``arrivals = "poisson"``."""
    values: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    capacity_in_flight: Annotated[int, Field(ge=1)] = 64


class Goals(BaseModel):
    """What the figures are held against in the report; ``--strict`` makes missing one fail."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    p50_s: Annotated[float, Field(gt=0)] | None = None
    p99_s: Annotated[float, Field(gt=0)] | None = None
    runs_per_s: Annotated[float, Field(gt=0)] | None = None
    goodput_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of a sweep: least goodput beyond capacity, divided by the best."""


class Stage(BaseModel):
    """One load that is put on the service, and how results call it."""

    model_config = ConfigDict(frozen=True)

    name: str
    load: AnyLoad
    of_capacity: float | None = None
    """The load's rate is this multiple of the measured capacity, once that is known."""

    def at_capacity(self, runs_per_s: float) -> "Stage":
        """With its rate in runs a second, now that the capacity is known."""
        if self.of_capacity is None or not isinstance(self.load, Poisson):
            return self
        rate = max(0.1, self.of_capacity * runs_per_s)
        return self.model_copy(
            update={"load": self.load.model_copy(update={"rate_per_s": rate}), "of_capacity": None}
        )


class Scenario(BaseModel):
    """A whole load test."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=SCHEMA)]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    title: str
    description: str = ""
    load: AnyLoad
    programs: Annotated[list[AnyKind], Field(min_length=1)]
    sweep: Sweep | None = None
    goals: Goals = Goals()
    via: Literal["sdk", "http"] = "sdk"
    """How Rollyard is called: by its SDK, or by bare HTTP for rates beyond one SDK's process."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Slots of a service that the bench starts itself; None: as the worker decides."""

    @model_validator(mode="after")
    def _sweep_fits(self) -> Self:
        wanted = {"in_flight": "closed", "rate_per_s": "poisson", "of_capacity": "poisson"}
        if self.sweep and self.load.arrivals != wanted[self.sweep.parameter]:
            raise ValueError(
                f"sweep.parameter = {self.sweep.parameter!r} needs load.arrivals = "
                f"{wanted[self.sweep.parameter]!r}, not {self.load.arrivals!r}"
            )
        return self

    def works(self, seed: str, *, first: int = 0) -> Iterator[Work]:
        """Programs of the mix, without end."""
        return works(self.programs, seed, first=first)

    def shares(self) -> dict[str, float]:
        """Kind to its share of all runs; they sum up to 1."""
        whole = sum(kind.weight for kind in self.programs)
        found: dict[str, float] = {}
        for kind in self.programs:
            found[kind.name] = found.get(kind.name, 0.0) + kind.weight / whole
        return found

    def stages(self) -> list[Stage]:
        """The loads to put on, in order."""
        if self.sweep is None:
            return [Stage(name=self.load.summary(), load=self.load)]
        if self.sweep.parameter == "of_capacity":
            return self._capacity_stages(self.sweep)
        found: list[Stage] = []
        for value in self.sweep.values:
            number = int(value) if self.sweep.parameter == "in_flight" else value
            load = self.load.with_field(self.sweep.parameter, number)
            found.append(Stage(name=load.summary(), load=load))
        return found

    def _capacity_stages(self, sweep: Sweep) -> list[Stage]:
        in_flight, base = sweep.capacity_in_flight, self.load.common()
        capacity = Closed(arrivals="closed", in_flight=in_flight, **base)
        return [
            Stage(name=f"capacity ({in_flight} in flight)", load=capacity),
            *(
                Stage(name=f"{value:g} of capacity", load=self.load, of_capacity=value)
                for value in sweep.values
            ),
        ]


def names() -> list[str]:
    """The package's scenarios."""
    return sorted(path.stem for path in _PACKAGED.glob("*.toml"))


def path_of(name: str) -> Path:
    """Where a scenario's file is: of the package by its name, or a path of the user's.

    Raises:
        ScenarioError: there is none.
    """
    if name in names():
        return _PACKAGED / f"{name}.toml"
    path = Path(name)
    if path.suffix in (".toml", ".jsonl", ".gz"):
        if path.is_file():
            return path
        raise ScenarioError(f"{name}: no such file")
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ScenarioError(
        f"there is no scenario {name!r}.{hint} The package has {', '.join(names())}; "
        "or give the path of a .toml or .jsonl file"
    )


def load(name: str) -> Scenario:
    """Read a scenario of the package by name, a TOML file, or a JSON Lines file of programs.

    Raises:
        ScenarioError: there is none of that name, or it is malformed.
    """
    path = path_of(name)
    if path.suffix == ".toml":
        return parse(path.read_text(), at=path)
    return from_fields(
        {
            "schema": SCHEMA,
            "name": "own-programs",
            "title": f"Programs of {path.name}",
            "load": {"arrivals": "closed", "in_flight": 64, "duration_s": 20},
            "programs": [{"kind": "jsonl", "path": path.name}],
        },
        at=path,
    )


def parse(text: str, *, at: Path) -> Scenario:
    """Read a scenario's TOML; ``at`` is where it stands, for messages and relative paths.

    Raises:
        ScenarioError: it is malformed.
    """
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{at}: not TOML: {error}") from None
    return from_fields(fields, at=at)


def from_fields(fields: dict[str, Any], *, at: Path) -> Scenario:
    """As :func:`parse`, of TOML already read."""
    if fields.get("schema") != SCHEMA:
        raise ScenarioError(
            f"{at}: the first line must be `schema = {SCHEMA}` (the version of this format), "
            f"not {fields.get('schema', 'nothing')!r}"
        )
    try:
        scenario = Scenario.model_validate(fields)
    except ValidationError as error:
        raise ScenarioError("\n".join(f"{at}: {line}" for line in _lines(error))) from None
    for kind in scenario.programs:
        if isinstance(kind, Listed):
            try:
                kind.fill(read_works(at.parent / kind.path))
            except ListError as error:
                raise ScenarioError(str(error)) from None
    return scenario


def _lines(error: ValidationError) -> list[str]:
    found: list[str] = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        match problem["type"]:
            case "extra_forbidden":
                message = f"there is no such field{_like(str(problem['loc'][-1]))}"
            case "union_tag_invalid":
                context = problem.get("ctx", {})
                given, known = str(context["tag"]), str(context["expected_tags"])
                choices = [word.strip("' ") for word in known.split(",")]
                message = f"{given!r} is none of {known}{_like(given, choices)}"
            case "union_tag_not_found":
                context = problem.get("ctx", {})
                choices = ", ".join(_TAGS[str(context["discriminator"]).strip("'")])
                message = f"must say {context['discriminator']}: one of {choices}"
            case _:
                pass
        found.append(f"{place}: {message}" if place else message)
    return found


def _fields_known() -> list[str]:
    models: list[type[BaseModel]] = [Scenario, Sweep, Goals, *_members(AnyLoad), *_members(AnyKind)]
    return sorted({field for model in models for field in model.model_fields})


def _members(union: Any) -> list[type[BaseModel]]:
    return list(get_args(get_args(union)[0]))


def _like(word: str, choices: list[str] | None = None) -> str:
    close = difflib.get_close_matches(word, choices or _fields_known(), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _tags(union: Any, tag: str) -> list[str]:
    return [str(get_args(model.model_fields[tag].annotation)[0]) for model in _members(union)]


_TAGS = {"arrivals": _tags(AnyLoad, "arrivals"), "kind": _tags(AnyKind, "kind")}

__all__ = ["SCHEMA", "Goals", "Load", "Scenario", "ScenarioError", "Stage", "Sweep",
           "from_fields", "load", "names", "parse", "path_of"]  # fmt: skip
