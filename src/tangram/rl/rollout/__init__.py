"""Rollout: groups of episodes, each at its own pace."""
