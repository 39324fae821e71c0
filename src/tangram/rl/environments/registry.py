"""The registry: tasks by name or by import path.

Owns the names. Never creates or plays an environment. Promises that `resolve` returns only complete Tasks, and imports
a built-in task only on demand.

    @register("maze")
    class Maze: ...

    resolve("frozenlake")           # a built-in name
    resolve("maze")                 # a registered one
    resolve("my_package.maze:Maze") # an import path
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast, overload

from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import RolloutSettings, TaskSettings
from tangram.rl.environments.protocol import Task

BUILT_IN: Mapping[str, str] = {
    "frozenlake": "tangram.rl.environments.frozenlake:FrozenLake",
    "chain": "tangram.rl.environments.chain:Chain",
    "codefix": "tangram.rl.environments.codefix:CodeFix",
    "lookup": "tangram.rl.environments.lookup:Lookup",
}

FIELD = "environment"
"""The config key that names a task."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_task_by_name: dict[str, Task] = {}

T = TypeVar("T")


@overload
def register(name: str) -> Callable[[T], T]: ...
@overload
def register(name: str, task: T) -> T: ...
def register(name: str, task: Any = None) -> Any:
    """Registers `task` by this name; without it, returns a decorator. The same task may be registered again, as on a
    reload of its module. Raises InvalidConfig."""
    if task is None:
        return lambda decorated: register(name, decorated)
    if not _NAME.fullmatch(name):
        raise InvalidConfig("name", name, "a name of letters, digits, dots, dashes and underscores")
    _require_task(name, task)
    existing: Any = BUILT_IN.get(name) or _task_by_name.get(name)
    if existing is not None and path_of(task) != (existing if isinstance(existing, str) else path_of(existing)):
        raise InvalidConfig("name", name, f"a name that is free: this one is {existing!r}")
    if name not in BUILT_IN:
        _task_by_name[name] = task
    return task


def names() -> tuple[str, ...]:
    """All names that `resolve` accepts, except import paths."""
    return (*BUILT_IN, *sorted(_task_by_name))


def resolve(name: str) -> Task:
    """Returns the task of this name or import path. Raises InvalidConfig."""
    task = _task_by_name.get(name)
    if task is not None:
        return task
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names())}"
        raise InvalidConfig(FIELD, name, f"a registered name, or an import path such as my_package.maze:Maze ({hint})")
    imported = _import_path(path)
    _require_task(name, imported)
    return cast(Task, imported)


def task_of(settings: TaskSettings) -> Task:
    """Raises InvalidConfig."""
    return resolve(settings.environment or settings.name)


def tasks_of(settings: RolloutSettings) -> list[Task]:
    """Raises InvalidConfig, also for no task and for two of the same name."""
    if not settings.tasks:
        raise InvalidConfig("tasks", settings.tasks, "at least one task to be played: [[tasks]] with a name")
    names = [task.name for task in settings.tasks]
    if len(set(names)) < len(names):
        raise InvalidConfig("tasks.name", names, "each table [[tasks]] to have its own name")
    return [task_of(task) for task in settings.tasks]


def words_of(tasks: Iterable[Task | str]) -> tuple[str, ...]:
    """Returns every word of these tasks once, for a shared vocabulary. Raises InvalidConfig if a task has no words of
    its own: it needs a tokenizer of text."""
    words: set[str] = set()
    for each in tasks:
        task = resolve(each) if isinstance(each, str) else each
        if not task.words:
            raise InvalidConfig(FIELD, path_of(task), "a task that names its words: this one needs a tokenizer of text")
        words.update(task.words)
    return tuple(sorted(words))


def missing_of(task: object) -> list[str]:
    """Returns the missing attributes of a Task, one sentence each; empty for a Task."""
    missing = []
    words = getattr(task, "words", None)
    if not isinstance(words, tuple) or not all(isinstance(word, str) and word.split() == [word] for word in words):
        missing.append("words: a tuple of words without spaces, empty if a tokenizer of text is needed")
    for key in ("turns_max", "tokens_max"):
        value = getattr(task, key, None)
        if type(value) is not int or value < 1:
            missing.append(f"{key}: a whole number, at least 1")
    agents = getattr(task, "agents", None)
    if not isinstance(agents, Mapping) or not all(callable(make) for make in agents.values()):
        missing.append(
            "agents: a mapping from names to what makes an agent of a random.Random, empty if there are none"
        )
    if hasattr(task, "acts_outside"):
        missing.append("needs_client, which is the new name of acts_outside")
    if not callable(task):
        missing.append("a call with an ExternalResources that makes an environment")
    if isinstance(task, type):
        methods = ("reset", "step", "close")
        missing += [f"async def {name}" for name in methods if not _is_async(getattr(task, name, None))]
    return missing


def path_of(task: object) -> str:
    """The name in messages: `module:name` if it has them."""
    named = task if hasattr(task, "__qualname__") else type(task)
    return f"{named.__module__}:{getattr(named, '__qualname__', '?')}"


def _require_task(name: str, task: object) -> None:
    missing = missing_of(task)
    if missing:
        raise InvalidConfig(FIELD, name, f"a Task; {path_of(task)} lacks {'; '.join(missing)}")


def _is_async(method: object) -> bool:
    # A decorated method may be a plain function that returns an awaitable, so only certain errors are refused.
    return callable(method) and (inspect.iscoroutinefunction(method) or hasattr(method, "__wrapped__"))


def _import_path(path: str) -> Any:
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise InvalidConfig(FIELD, path, "module:name, as my_package.maze:Maze")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # the path of an installed command lacks the current folder
    try:
        target: Any = importlib.import_module(module)
    except Exception as error:
        problem = "".join(traceback.format_exception_only(error)).strip()
        raise InvalidConfig(FIELD, path, f"a module {module} that can be imported ({problem})") from error
    for name in attribute.split("."):
        if not hasattr(target, name):
            near = difflib.get_close_matches(name, [each for each in dir(target) if not each.startswith("_")], n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise InvalidConfig(FIELD, path, f"a name in {module}: there is no {name}{hint}")
        target = getattr(target, name)
    return target
