"""An MCP server with the tool ``python``, on standard input and output: ``rollyard mcp``."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from rollyard._version import __version__
from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.python_tool import DESCRIPTION, NAME, AsyncPythonTool


def make_server(tool: AsyncPythonTool) -> MCPServer:
    """A server that answers calls with what programs print.

    A program that fails is a plain answer. A fault of the service is an error of the call, whose
    text says that it is not the program's.
    """
    server: MCPServer = MCPServer("rollyard", version=__version__, log_level="WARNING")

    @server.tool(name=NAME, description=DESCRIPTION, structured_output=False)
    async def python(code: str) -> str:  # pyright: ignore[reportUnusedFunction]
        try:
            return await tool.python(code)
        except ServiceFault as fault:
            raise ToolError(f"service fault, not the program's: {fault.message}") from fault

    return server
