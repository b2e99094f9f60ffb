"""Cases of `tools/abuse_server.py`."""
