"""Width: how a program learns how many cores it may use.

Owns the environment variables in which programs look for that number. Without them a program takes the number of cores
of the machine and starts as many threads, which then compete for the few cores that it was granted.
"""

from __future__ import annotations

from tangram.core.demand import CORE

PLACEHOLDER = "{cpus}"
"""The width in a command, as in `pytest -n {cpus}`."""

COUNT_VARIABLES = (
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

OPTION_VARIABLES = {"MAKEFLAGS": "-j{cpus}", "NINJAFLAGS": "-j{cpus}", "SCONSFLAGS": "-j{cpus}"}
"""Variables that hold options."""


def whole_cores(width: int) -> int:
    """Milli-cores as a number of cores, rounded up."""
    return max(1, -(-width // CORE))


def with_width(width: int, environment: dict[str, str]) -> dict[str, str]:
    """The environment with the width in it. Variables that the caller has set stay."""
    cpus = str(whole_cores(width))
    own = dict.fromkeys(COUNT_VARIABLES, cpus) | {
        name: value.replace(PLACEHOLDER, cpus) for name, value in OPTION_VARIABLES.items()
    }
    return own | environment | {"TANGRAM_CPUS": cpus}


def substitute_width(command: str | tuple[str, ...], width: int) -> str | tuple[str, ...]:
    """The command with the width in the place of `{cpus}`."""
    cpus = str(whole_cores(width))
    if isinstance(command, str):
        return command.replace(PLACEHOLDER, cpus)
    return tuple([word.replace(PLACEHOLDER, cpus) for word in command])
