"""A program of a fork server whose import starts a thread."""

from __future__ import annotations

import threading

from tests.processes import fork_server_children

main = fork_server_children.main
threading.Thread(target=threading.Event().wait, daemon=True).start()
