"""Environments: tasks that an agent plays."""
