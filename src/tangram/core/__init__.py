"""The pure scheduler: events in, effects out."""
