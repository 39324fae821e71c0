"""The host of one function: its template and its instances, from none to the limit and back to none.

Owns which instance is idle, which one ends when, and whether there is a template. How many run at once is for the pool
of the function to say, which the scheduler counts. Promises that an idle function has no process after its idle times,
that an instance which may not be used again never is, and that closing leaves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.functions.instance import Gone, Instance
from tangram.managers.functions.templates import Template
from tangram.managers.functions.work import FunctionSpec
from tangram.processes.process_tree import Census

CALLS_MAX = 1000
"""Of one instance: what a function leaves in memory is its own matter, but not for ever."""
TEMPLATE_IDLE_FACTOR = 2.0
"""A template without an instance ends after this times the idle time of instances."""
END_S_MAX = STOP_GRACE_S + 12.0
"""Until an instance that is to end is gone. Then its template does not do its work and is ended with all it has."""

log = logging.getLogger("tangram.functions")


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one function, or of several together."""

    instances: int = 0
    """That live now."""
    idle: int = 0
    templates: int = 0
    begun: int = 0
    """Instances so far."""
    calls: int = 0
    busy_s: float = 0.0
    """Seconds in which instances served calls."""
    instance_s: float = 0.0
    """Seconds in which there were instances."""

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Host:
    def __init__(self, spec: FunctionSpec, census: Census) -> None:
        self.spec = spec
        self._census = census
        self._loop = asyncio.get_running_loop()
        self._template: Template | None = None
        self._template_by_instance: dict[Instance, Template] = {}
        """Of all that live."""
        self._idle: list[Instance] = []
        """The one that was used last is used next, so that the others become superfluous."""
        self._beginning = 0
        """Callers that wait for an instance."""
        self._leaving: dict[Template, asyncio.Task[None]] = {}
        self._template_timer: asyncio.TimerHandle | None = None
        self._warned = False
        self._closed = False
        self._past = Statistics()
        self._busy_since: dict[Instance, float] = {}

    # ---- instances for calls ----

    def take_idle(self) -> Instance | None:
        while self._idle:
            instance = self._idle.pop()
            self._disarm(instance)
            if instance.usable:
                self._busy_since[instance] = self._loop.time()
                return instance
            self.end_now(instance)  # it has died, or lost its socket
        return None

    async def take(self) -> Instance:
        """A new one. Raises FunctionBroken, or ManagerError."""
        self._beginning += 1
        instance: Instance | None = None
        try:
            template = self._present_template()
            self._warn(await asyncio.shield(template.ready))
            if self._closed:
                raise ManagerError("functions are being closed")
            instance = template.begin()
            self._template_by_instance[instance] = template
            instance.gone.add_done_callback(lambda _, gone=instance: self._on_gone(gone))  # type: ignore[misc]
            await asyncio.shield(instance.ready)
        except BaseException:
            if instance is not None:
                self.end_now(instance)
            raise
        finally:
            self._beginning -= 1
            self._rest()
        self._busy_since[instance] = self._loop.time()
        return instance

    def _present_template(self) -> Template:
        if self._closed:
            raise ManagerError("functions are being closed")
        if self._template is None:
            try:
                self._template = Template(self.spec, self._census, self._part_with)
            except OSError as error:
                raise ManagerError(f"the template of {self.spec.name} cannot be started: {error}") from error
        return self._template

    def _warn(self, forks: bool) -> None:
        if not forks and not self._warned:
            self._warned = True
            log.warning(
                "importing function %s starts threads, so its instances cannot be forked: each one imports it anew."
                " Start threads when the function is called, not when its module is imported.",
                self.spec.name,
            )

    def give_back(self, instance: Instance) -> None:
        """It can be used again."""
        self._not_busy(instance)
        self._idle.append(instance)
        if len(self._template_by_instance) > self.spec.max_instances:
            self.end_now(self._idle[0])
        else:
            instance.idle_timer = self._loop.call_later(self.spec.idle_s, self.end_now, instance)

    async def end(self, instance: Instance, grace_s: float) -> Gone:
        """Until nothing of it is left."""
        self._withdraw(instance)
        template = self._template_by_instance.get(instance)
        if template is not None:
            template.end(instance, grace_s)
            await asyncio.wait({instance.gone}, timeout=END_S_MAX)
            if not instance.gone.done():
                self._part_with(template)
        return await asyncio.shield(instance.gone)

    def end_now(self, instance: Instance) -> None:
        """Whoever wants to know when it is gone looks at `gone`."""
        self._withdraw(instance)
        template = self._template_by_instance.get(instance)
        if template is not None:
            template.end(instance, 0.0)

    def _withdraw(self, instance: Instance) -> None:
        self._disarm(instance)
        if instance in self._idle:
            self._idle.remove(instance)

    def _disarm(self, instance: Instance) -> None:
        if instance.idle_timer is not None:
            instance.idle_timer.cancel()
            instance.idle_timer = None

    def _on_gone(self, instance: Instance) -> None:
        self._withdraw(instance)
        self._not_busy(instance)
        if self._template_by_instance.pop(instance, None) is not None:
            lived_s = self._loop.time() - instance.began_s
            self._past += Statistics(begun=1, calls=instance.calls, instance_s=lived_s)
        self._rest()

    def _not_busy(self, instance: Instance) -> None:
        since = self._busy_since.pop(instance, None)
        if since is not None:
            self._past += Statistics(busy_s=self._loop.time() - since)

    # ---- the template ----

    def _rest(self) -> None:
        """Without instances the template has some time left."""
        if self._template_timer is not None:
            self._template_timer.cancel()
            self._template_timer = None
        if self._template is not None and not self._template_by_instance and not self._beginning:
            after_s = TEMPLATE_IDLE_FACTOR * self.spec.idle_s
            self._template_timer = self._loop.call_later(after_s, self._part_with, self._template)

    def _part_with(self, template: Template) -> None:
        """It ends, and so do its instances. The next call gets another one."""
        if self._template is template:
            self._template = None
        if template not in self._leaving:
            task = self._leaving[template] = self._loop.create_task(template.close())
            task.add_done_callback(lambda task: self._on_left(template, task))

    def _on_left(self, template: Template, task: asyncio.Task[None]) -> None:
        del self._leaving[template]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            context: dict[str, Any] = {"message": f"function {self.spec.name} left processes", "exception": error}
            self._loop.call_exception_handler(context)

    async def close(self) -> None:
        """Everything ends at once."""
        self._closed = True
        for instance in list(self._idle):
            self._withdraw(instance)
        if self._template is not None:
            self._part_with(self._template)
        while self._leaving:
            await asyncio.wait(self._leaving.values())
        if self._template_timer is not None:
            self._template_timer.cancel()

    def statistics(self) -> Statistics:
        now = self._loop.time()
        living = list(self._template_by_instance)
        return self._past + Statistics(
            instances=len(living),
            idle=len(self._idle),
            templates=(self._template is not None) + len(self._leaving),
            begun=len(living),
            calls=sum(instance.calls for instance in living),
            busy_s=sum(now - since for since in self._busy_since.values()),
            instance_s=sum(now - instance.began_s for instance in living),
        )
