"""Reinforcement learning of agents; every step outside the model is an action.

Generation, environments and rewards proceed independently for each trajectory. Code that needs PyTorch is in `rl.model`
and is imported where it is used; all other modules do not need it.
"""
