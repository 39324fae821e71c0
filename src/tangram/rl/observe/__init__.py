"""Progress, reports, timelines and pool usage of a rollout or a training run."""
