"""``rollyard mcp``, by MCP's own client over standard input and output."""

import os
import sys
from typing import Protocol

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.types import CallToolResult, TextContent


class _Service(Protocol):
    address: str


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def server(url: str, *arguments: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "rollyard.cli", "mcp", "--url", url, *arguments],
        env=dict(os.environ),
    )


def text(result: CallToolResult) -> str:
    [content] = result.content
    assert isinstance(content, TextContent)
    return content.text


async def test_tool_runs_programs(service: _Service) -> None:
    async with Client(server(service.address, "--timeout-s", "1")) as client:
        [tool] = (await client.list_tools()).tools
        assert tool.name == "python"
        assert tool.input_schema["required"] == ["code"]
        good = await client.call_tool("python", {"code": "print('hi')\n6 * 7"})
        assert (good.is_error, text(good)) == (False, "hi\n42")
        bad = await client.call_tool("python", {"code": "1 / 0"})
        assert not bad.is_error  # the program's fault is an answer
        assert text(bad).endswith("ZeroDivisionError: division by zero")
        late = await client.call_tool("python", {"code": "while True: pass"})
        assert "timeout" in text(late)
        wrong = await client.call_tool("python", {"source": "1"})
        assert wrong.is_error


def test_wrong_url_is_2() -> None:
    import subprocess

    command = [sys.executable, "-m", "rollyard.cli", "mcp", "--url", "ftp://x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "base_url" in done.stderr
