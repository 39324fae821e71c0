"""Managers: turn a Grant into a Lease and run inside it. One folder or file per kind of resource."""
