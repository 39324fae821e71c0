"""Settings of rollouts and training, as records of their TOML tables."""
