"""Sandboxes as containers of a Docker engine."""

from tangram.managers.sandboxes.docker.manager import DockerManager

__all__ = ["DockerManager"]
