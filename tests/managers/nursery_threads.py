"""A program of a nursery whose import starts a thread."""

from __future__ import annotations

import threading

from tests.managers import nursery_children

main = nursery_children.main
threading.Thread(target=threading.Event().wait, daemon=True).start()
