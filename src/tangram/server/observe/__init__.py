"""What the picture of the service is made of: each part keeps or shows one thing."""
