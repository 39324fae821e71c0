"""The spawner: a privileged process that starts programs inside sandboxes, and its client."""
