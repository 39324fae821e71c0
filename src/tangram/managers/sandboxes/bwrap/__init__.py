"""Sandboxes on this machine: namespaces, overlays, control groups."""
