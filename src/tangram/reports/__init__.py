"""Pages, charts, tables, timelines and live screens, shared by all commands."""
