"""A server of tools that speaks the Model Context Protocol: notes that the policy keeps during an episode."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def write_note(text: str) -> str:
    """Keeps a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def read_notes() -> str:
    """Shows all notes."""
    return "\n".join(notes) or "there are none"


if __name__ == "__main__":
    server.run("stdio")
