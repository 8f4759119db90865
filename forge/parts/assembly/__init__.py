"""Assembly: from toolsets to a server, its command line and its documents."""
