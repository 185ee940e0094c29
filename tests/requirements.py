"""What the sandbox promises. Each promise has at least one test in ``tests/security``.

``tests/unit/test_requirements.py`` checks both directions: no promise without a test, no test in
``tests/security`` without a promise.
"""

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])

PROMISES = {
    # Walls: one for each layer of `rollyard doctor`.
    "wall.user": "a program is an unprivileged user, mapped to host ids that nobody else has",
    "wall.mount": "a program sees a read-only root of what it needs, and no path of the host",
    "wall.pid": "a program sees and signals only its own processes",
    "wall.ipc": "each slot has an IPC namespace and a /dev/shm of its own",
    "wall.uts": "each slot has a host name of its own, the same everywhere",
    "wall.network": "nothing is reachable from a program, and it is refused at once",
    "wall.capabilities": "a program has no capability in any set",
    "wall.no_new_privileges": "a program cannot gain privileges by executing anything",
    "wall.seccomp_tree": "kernel interfaces that nothing needs are refused to the whole jail",
    "wall.landlock": "Landlock refuses TCP and writing outside the box a second time",
    "wall.seccomp_slot": "a program gets no namespace, mount, tracing, key ring or io_uring",
    "wall.descriptors": "a program has the descriptors 0, 1 and 2, and no other",
    "wall.rlimits": "resource limits bound what a process takes beside memory",
    "wall.tmpfs": "what a program writes has a size and a number of files",
    "wall.environment": "nothing of the service's environment or memory reaches a program",
    "wall.cgroup_memory": "the memory limit counts the whole run, and striking it is told apart",
    "wall.cgroup_pids": "the number of processes is bounded for the whole run",
    # The self-check.
    "doctor.sees": "a layer that is not there is noticed",
    "doctor.refuses": "a worker without a layer refuses to start, or says so in every result",
    # Results.
    "result.unforgeable": "a program cannot write, change or choose how its end is reported",
    "result.truthful": "outcome, exit code and signal are what really happened",
    "result.no_infra_at_will": "nothing that a program leaves behind makes its run a fault of ours",
    "result.unmixed": "outputs of runs never mix",
    # Between runs.
    "leak.nothing": "a run finds nothing that an earlier run in the same slot left",
    "leak.random": "random numbers, names and identifiers do not repeat from run to run",
    "end.kill_all": "nothing of a run lives on after its answer, however it hid",
    # Faults of ours.
    "fault.not_the_models": "a fault of the service is never reported as the program's",
    "fault.one_answer": "every caller gets exactly one answer, whatever process is killed",
    # The filter, both ways.
    "filter.refuses": "each refused system call is refused",
    "filter.lets_work": "ordinary libraries work under the filter",
    # The code itself.
    "code.guest_is_standard": "code that runs in the jail imports the standard library only",
    "code.no_pickle": "the host never unpickles",
}


def requirement(*promises: str) -> Callable[[Test], Test]:
    """Tie a test to the promises that it holds us to."""
    unknown = set(promises) - PROMISES.keys()
    if unknown:
        raise KeyError(f"no such promise: {', '.join(sorted(unknown))}")
    return lambda test: test
