"""Questions that the supervisor asks the parts it started: are you there yet?"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx2

PROBE_TIMEOUT_S = 2.0


async def answers_ping(path: Path) -> bool:
    """True when the Valkey or Redis server on this Unix socket answers PING."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False


async def gateway_ready(address: str) -> bool:
    """True when the gateway answers that it can take runs."""
    response = await _get(address, "/readyz")
    return response is not None and response.status_code == 200


async def workers_ready(address: str, *, key: str = "") -> bool:
    """True when the queue knows at least one worker with a slot."""
    response = await _get(address, "/v1/stats", key)
    if response is None or response.status_code != 200:
        return False
    stats: dict[str, Any] = response.json()
    return stats["workers"] >= 1 and stats["slots"] >= 1


async def _get(address: str, path: str, key: str = "") -> httpx2.Response | None:
    transport = None
    if address.startswith("unix://"):
        transport = httpx2.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
        address = "http://localhost"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(
        transport=transport, timeout=PROBE_TIMEOUT_S, headers=headers, trust_env=False
    ) as client:
        try:
            return await client.get(address + path)
        except httpx2.HTTPError:
            return None
