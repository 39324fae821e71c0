"""What the server shows of itself."""
