"""Objects that must start anew in a forked child.

Ray, data loaders and multiprocessing fork. A child that used its parent's sockets would mix up
both processes' answers, and one that merely collected the parent's event loop would take the
parent's descriptors out of the epoll set that both share. So the child never touches what it
inherited: it keeps it alive, unused, and builds its own.
"""

import os
import weakref
from typing import Final, Protocol


class ForkAware(Protocol):
    def forked(self) -> object:
        """Forget all sockets, loops and locks; return what must stay alive, untouched."""
        ...


_live: "weakref.WeakSet[ForkAware]" = weakref.WeakSet()
_inherited: Final[list[object]] = []


def watch(obj: ForkAware) -> None:
    """Call ``obj.forked()`` in every child forked while ``obj`` lives."""
    _live.add(obj)


def _in_child() -> None:
    # Only the forking thread exists here, so nothing changes the set underneath.
    _inherited.extend(obj.forked() for obj in list(_live))


os.register_at_fork(after_in_child=_in_child)
