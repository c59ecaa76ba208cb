"""An MCP server with one tool, for agents that have such servers."""

from mcp.server import MCPServer

server = MCPServer("notes", instructions="Notes of the team.")


@server.tool()
def add_note(text: str) -> str:
    """Adds a note."""
    return f"noted: {text.upper()}"


server.run()
