"""Engines: they generate tokens, behind one protocol."""
