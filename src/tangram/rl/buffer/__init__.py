"""The sample buffer between rollout and training."""
