"""What the service shows of itself."""
