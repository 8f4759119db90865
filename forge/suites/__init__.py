"""unittest classes that the rigs carry in their test_server.py."""
