"""The protocol between a spawner and its owner, and where the next owner finds the spawner.

Messages are packets (processes/packets.py): requests of the owner with an `id`; replies with that `id`; `exit` with the
`id` of a program or file work that has ended; `gone` with the name of a sandbox that has ended. Standard library only.
"""

from __future__ import annotations

PROTOCOL = 2
"""Version of the messages. To be raised whenever a message of an earlier owner could be misunderstood."""
FDS_MAX = 8
"""Descriptors in one request."""
SOCKET_NAME = "socket"
"""The socket on which a spawner without an owner listens, in the directory of the owner."""
