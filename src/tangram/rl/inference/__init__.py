"""Inference: engines that generate tokens, and the router in front of them."""
