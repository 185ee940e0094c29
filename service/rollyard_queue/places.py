"""From a setting to the places of a queue's shards.

====================================================  ==========================================
``redis://host:6379/0``, ``rediss://…``, ``unix:///…``  one server has all shards
several of these, separated by commas                 shard *i* is on server *i* modulo their number
``redis+cluster://host:6379,host:6379``               a Redis Cluster; any of its nodes may be named
``redis+sentinel://host:26379,host:26379/name``       the primary that Redis Sentinel names
====================================================  ==========================================

``rediss+cluster`` and ``rediss+sentinel`` speak TLS. ``user:password@`` before the first host is
for all servers; sentinels themselves are asked without.
"""

from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, urlsplit

from redis.crc import key_slot

from rollyard_queue.connections import Node, Server
from rollyard_queue.moving import Cluster, Directory, MovingNode, Sentinels

SENTINEL_PORT = 26379
REDIS_PORT = 6379


class Places:
    """The node of each shard, and what must be closed at the end."""

    def __init__(self, nodes: Sequence[Node], owned: Sequence[Server | Directory]) -> None:
        self.nodes = nodes
        self._owned = owned

    @classmethod
    def from_url(cls, url: str, *, tags: Sequence[str]) -> "Places":
        """The places of the shards with these tags. Nothing is connected yet.

        Raises:
            ValueError: the URL is malformed, or its scheme is unknown.
        """
        kind = urlsplit(url).scheme.partition("+")[2]
        if kind == "cluster":
            return cls._moving(_cluster(url), tags)
        if kind == "sentinel":
            return cls._moving(_sentinels(url), tags)
        servers = [Server.from_url(one.strip()) for one in _split(url)]
        return cls([servers[i % len(servers)] for i in range(len(tags))], servers)

    @classmethod
    def _moving(cls, directory: Directory, tags: Sequence[str]) -> "Places":
        nodes = [MovingNode(directory, key_slot(tag.encode())) for tag in tags]
        return cls(nodes, [directory])

    async def close(self) -> None:
        """Close all connections."""
        for one in self._owned:
            await one.close()


def _split(url: str) -> list[str]:
    """Whole URLs; a comma in a path or password must be percent-encoded."""
    return [one for one in url.split(",") if one.strip()] or [url]


def _hosts(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """The hosts and ports of a URL that has several."""
    hosts: list[tuple[str, int]] = []
    for one in parts.netloc.rpartition("@")[2].split(","):
        each = urlsplit(f"//{one.strip()}")
        if not each.hostname:
            raise ValueError(f"a host is missing in {parts.scheme}://…{one!r}")
        hosts.append((each.hostname, each.port or default_port))
    return hosts


def _url_maker(parts: SplitResult, path: str) -> Callable[[str, int], str]:
    scheme = parts.scheme.partition("+")[0]
    login, at, _ = parts.netloc.rpartition("@")

    def url_of(host: str, port: int) -> str:
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{login}{at}{name}:{port}{path}"

    return url_of


def _cluster(url: str) -> Cluster:
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise ValueError("a cluster has database 0 alone: no path after its hosts")
    url_of = _url_maker(parts, "")
    return Cluster([url_of(host, port) for host, port in _hosts(parts, REDIS_PORT)], url_of=url_of)


def _sentinels(url: str) -> Sentinels:
    parts = urlsplit(url)
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("the name of the primary is missing: redis+sentinel://host:26379/name")
    scheme = parts.scheme.partition("+")[0]
    seeds = [
        f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        for host, port in _hosts(parts, SENTINEL_PORT)
    ]
    return Sentinels(seeds, name=name, url_of=_url_maker(parts, f"/{database or 0}"))
