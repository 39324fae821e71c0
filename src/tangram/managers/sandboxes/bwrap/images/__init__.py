"""Images: the layers of the root directories of sandboxes."""
