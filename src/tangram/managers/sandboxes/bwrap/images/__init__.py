"""Images: the layers that root directories of sandboxes are made of."""
