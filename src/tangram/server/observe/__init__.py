"""Observability of the server: views, metrics and stories."""
