"""How many runs may be at one gateway: additive increase, multiplicative decrease.

A gateway whose queue is full says so, at once and cheaply; but a client that only waits and comes
back with everything keeps an overloaded service as overloaded as it is. So the runs in flight are
bounded. The bound starts where it hinders nobody. A refusal halves it, once for all requests that
were sent before it was known, or lowers it to what the gateway did take of them. Each window of
answers adds STEP runs; when no refusal came for QUIET_S, each answer adds one, which doubles it in
the time of one window. What is above the bound waits here, in order, and costs the service
nothing. (Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion
avoidance", 1989: clients that do so come to equal shares.)
"""

MAX_RUNS = 65_536
# A batch is taken whole or not at all, so a small queue wants a small window; but one refusal is no
# reason to send runs one by one.
LEAST_RUNS = 64.0
STEP = 16.0
SHRINK = 0.5
QUIET_S = 5.0


class Window:
    """The bound of one gateway, and what is in flight there. Times are the loop's, in seconds."""

    def __init__(self) -> None:
        self.limit = float(MAX_RUNS)
        self.in_flight = 0
        self._cut_at = float("-inf")
        self._refusals = 0  # in a row

    @property
    def room(self) -> int:
        """Runs that may still be sent."""
        return int(self.limit) - self.in_flight

    @property
    def worth_sending(self) -> int:
        """Fewer than this are not worth a request: it would become one request for each run."""
        return max(1, min(64, int(self.limit) // 8))

    def sent(self, runs: int) -> None:
        """Note runs that left."""
        self.in_flight += runs

    def gone(self, runs: int) -> None:
        """Note runs that are in flight no more, for another reason than an answer."""
        self.in_flight -= runs

    def answered(self, runs: int, now: float) -> None:
        """Note answers, which open the window if it was in use."""
        if self.limit < MAX_RUNS and self.in_flight * 2 >= self.limit:
            quiet = now - self._cut_at > QUIET_S
            grown = self.limit + (runs if quiet else STEP * runs / self.limit)
            self.limit = min(float(MAX_RUNS), grown)
        self.in_flight -= runs

    def refused(self, runs: int, *, sent_at: float, now: float) -> None:
        """Note runs that were refused because the service is full."""
        if sent_at >= self._cut_at:
            least = min(self.limit, 1.0 if self._refusals else LEAST_RUNS)
            self.limit = max(least, min(self.limit, float(self.in_flight)) * SHRINK)
            self._cut_at = now
            self._refusals += 1
        self.in_flight -= runs
        # As the answers to one burst come in, what is still in flight is what was taken of it.
        self.limit = max(min(self.limit, LEAST_RUNS), min(self.limit, float(self.in_flight)))

    def admitted(self) -> None:
        """Note that a batch was taken."""
        self._refusals = 0
