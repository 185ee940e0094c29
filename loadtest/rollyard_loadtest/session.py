"""What one ``rollyard bench SCENARIO`` does from its arguments to its figures."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from rollyard_loadtest import scenario as scenarios
from rollyard_loadtest.bench import Bench, fits
from rollyard_loadtest.figures import BenchFigures
from rollyard_loadtest.stack import Stack, StackOptions, require_ready
from rollyard_loadtest.target import Address, TargetKind
from rollyard_loadtest.view import View, summary, terminal


class Session:
    """A scenario, the service it goes to, and the terminal.

    Raises:
        ScenarioError: there is no such scenario, or it is malformed.
        ValueError: an argument does not go with it.
    """

    def __init__(
        self,
        path: str,
        *,
        urls: Sequence[str],
        via: TargetKind | None,
        options: StackOptions,
        seed: str,
        overrides: dict[str, float],
    ) -> None:
        self.scenario = scenarios.load(path)
        if urls and options.null:
            raise ValueError("--null is for a service that the bench starts; leave out --url")
        fits(self.scenario, overrides)
        for name, value in overrides.items():
            try:
                self.scenario.load.with_field(name, value)
            except ValidationError as error:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag}: {error.errors()[0]['msg']}") from None
        self._path = path
        self._urls = urls
        self._via: TargetKind = via or self.scenario.via
        self._options = options
        self._seed = seed
        self._overrides = overrides
        self._console = terminal()

    def run(self) -> BenchFigures:
        """Start what is to be started, put the load on, show it, and stop.

        Raises:
            NotReady: there is no service, or it does not start.
            ClientDied: a process of the load generator ended early.
        """
        with contextlib.ExitStack() as held:
            stack = None
            urls = self._urls
            if not urls:
                self._console.print("starting a service on this machine …", style="dim")
                stack = held.enter_context(Stack(self._stack_options()))
                urls = stack.addresses
            view = held.enter_context(View(self._console, self.scenario.name))
            figures = asyncio.run(self._bench(urls, stack, view))
        self._console.print(summary(figures))
        return figures

    async def _bench(self, urls: Sequence[str], stack: Stack | None, view: View) -> BenchFigures:
        for url in urls:
            await require_ready(url)
        addresses = [Address(self._via, url, self._options.null) for url in urls]
        bench = Bench(path=self._path, scenario=self.scenario, addresses=addresses,
                      seed=self._seed, overrides=self._overrides, stack=stack)  # fmt: skip
        return await bench.run(view)

    def _stack_options(self) -> StackOptions:
        options = self._options
        if options.slots is None and not options.null and self.scenario.slots is not None:
            # Slots are worth their number only where programs wait for something.
            return replace(options, slots=self.scenario.slots)
        return options
