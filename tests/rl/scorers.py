"""Reward functions, in a module of their own: the processes that call them import it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import tangram


def length(played: dict[str, Any]) -> int:
    """A plain function."""
    return sum(len(turn["action"].split()) for turn in played["turns"])


@tangram.function(cpus=0.25, memory="256MiB", max_instances=2, timeout_s=30)
def told(played: dict[str, Any]) -> Any:
    """Whatever the last observation says."""
    kind, _, rest = played["observation"].partition(" ")
    match kind:
        case "number":
            return float(rest)
        case "text":
            return rest
        case "nothing":
            return None
        case "true":
            return True
        case "raise":
            raise ValueError("of no use")
        case "die":
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "second":  # fails once: the file says that it was here
            if not Path(rest).exists():
                Path(rest).touch()
                raise OSError("not yet")
            return 0.5
        case "count":
            with open(rest, "a") as file:
                file.write("called\n")
            return 1.0
    raise AssertionError(kind)


def answered(played: dict[str, Any]) -> float:
    """Parses the output of a command or a model."""
    answer = played["answer"]
    return float(answer["stdout"]) if "stdout" in answer else float(answer["share"]) * 10.0


NOT_A_FUNCTION = 7
