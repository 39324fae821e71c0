"""The server: the process behind `tangram serve`, which users call the shared service."""
