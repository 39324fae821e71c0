"""Sandboxes: three backends behind one manager interface, and what they share."""
