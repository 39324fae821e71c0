"""Width: how many units of parallelism a program is told that it has.

Owns the names under which programs look for that number. A program that is not told takes the number of cores of the
machine, starts as many threads, and then shares the few that it was granted among all of them.
"""

from __future__ import annotations

from tangram.core.demand import CORE

PLACEHOLDER = "{cpus}"
"""In a command: the width, as in `pytest -n {cpus}`."""

COUNTS = (
    "TANGRAM_CPUS",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
    "TBB_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKIO_WORKER_THREADS",
    "POLARS_MAX_THREADS",
    "ARROW_NUM_THREADS",
    "GOMAXPROCS",
    "CARGO_BUILD_JOBS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "CTEST_PARALLEL_LEVEL",
    "MAX_JOBS",
    "NPY_NUM_BUILD_JOBS",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
    "PYTHON_CPU_COUNT",
    "UV_THREADPOOL_SIZE",
    "DOTNET_PROCESSOR_COUNT",
    "JULIA_NUM_THREADS",
    "R_PARALLEL_NUM_CORES",
)
"""Variables that hold the number itself."""

JOBS = {"MAKEFLAGS": "-j{cpus}", "NINJAFLAGS": "-j{cpus}", "SCONSFLAGS": "-j{cpus}"}
"""Variables that hold options."""


def whole_cores(width: int) -> int:
    """Milli-cores as a number of cores: whoever may use one and a half needs two to run on."""
    return max(1, -(-width // CORE))


def told(width: int, environment: dict[str, str]) -> dict[str, str]:
    """The environment with the width in it. What the caller has set stays: it asked for that."""
    cpus = str(whole_cores(width))
    own = dict.fromkeys(COUNTS, cpus) | {name: value.replace(PLACEHOLDER, cpus) for name, value in JOBS.items()}
    return own | environment | {"TANGRAM_CPUS": cpus}


def filled_in(command: str | tuple[str, ...], width: int) -> str | tuple[str, ...]:
    """The command with the width in the place of `{cpus}`."""
    cpus = str(whole_cores(width))
    if isinstance(command, str):
        return command.replace(PLACEHOLDER, cpus)
    return tuple([word.replace(PLACEHOLDER, cpus) for word in command])
