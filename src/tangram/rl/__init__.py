"""Reinforcement learning of agents, every outside step of which is an action.

Generation, environments and rewards proceed independently for each trajectory. What needs PyTorch is in `rl.model` and
is imported where it is used; everything else does without.
"""
