"""Trajectories: records of what a rollout produces and a trainer consumes."""
