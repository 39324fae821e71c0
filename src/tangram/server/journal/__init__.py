"""The journal: acknowledged actions, sandboxes, images and tokens survive a crash."""
