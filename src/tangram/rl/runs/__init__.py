"""A run on disk: everything that a resumed run needs."""
