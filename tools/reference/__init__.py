"""Generators of the reference pages of docs/, which `make docs` runs; a test compares the pages with their source."""
