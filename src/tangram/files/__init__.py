"""Files that survive a crash: atomic files and directories, an append-only log, file locks."""
