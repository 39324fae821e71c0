"""Sandbox statistics: age, actions and last use of each sandbox.

Does not decide which sandboxes exist; the scheduler does.
"""

from __future__ import annotations

from tangram.core.scheduler import Scheduler
from tangram.server.observe.accounts import RunAccount


class TrackedSandbox:
    __slots__ = ("account", "actions", "active_actions", "last_used_at", "name", "node", "opened_at", "run")

    def __init__(self, name: str, run: str, account: RunAccount, node: str, now: float) -> None:
        self.name = name
        self.run = run
        self.account = account
        self.node = node
        """Empty until its first action is granted."""
        self.opened_at = self.last_used_at = now
        self.actions = self.active_actions = 0


class SandboxStats:
    def __init__(self) -> None:
        self.by_name: dict[str, TrackedSandbox] = {}
        """Least recently used first."""

    def open(self, name: str, run: str, account: RunAccount, node: str, now: float) -> None:
        self.by_name[name] = TrackedSandbox(name, run, account, node, now)
        account.sandboxes += 1

    def on_action_granted(self, sandbox: TrackedSandbox, node: str, now: float) -> None:
        sandbox.node = node or sandbox.node
        sandbox.actions += 1
        sandbox.last_used_at = now
        sandbox.active_actions += 1
        if self.by_name.pop(sandbox.name, None) is not None:
            self.by_name[sandbox.name] = sandbox
            if sandbox.active_actions == 1:
                sandbox.account.active += 1

    def on_action_ended(self, sandbox: TrackedSandbox, now: float) -> None:
        sandbox.active_actions -= 1
        sandbox.last_used_at = now
        if not sandbox.active_actions and sandbox.name in self.by_name:
            sandbox.account.active -= 1

    def drop_if_closed(self, name: str, scheduler: Scheduler) -> None:
        if not scheduler.has_sandbox(name):
            sandbox = self.by_name.pop(name, None)
            if sandbox is not None:
                sandbox.account.sandboxes -= 1
                sandbox.account.active -= bool(sandbox.active_actions)

    def drop_all_closed(self, scheduler: Scheduler) -> None:
        for name in [name for name in self.by_name if not scheduler.has_sandbox(name)]:
            self.drop_if_closed(name, scheduler)
