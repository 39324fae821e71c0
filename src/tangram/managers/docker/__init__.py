"""Sandboxes as containers of a Docker engine."""

from tangram.managers.docker.manager import DockerManager

__all__ = ["DockerManager"]
