"""Toolsets: the MCP tools, one concern a class."""
