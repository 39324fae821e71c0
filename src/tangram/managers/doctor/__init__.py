"""Diagnostics of this machine, for `tangram doctor`."""
