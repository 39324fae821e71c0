"""Start, supervise and communicate with processes of this machine."""
