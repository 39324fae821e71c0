"""The part that needs PyTorch: the transformer, generation, the objective, the learner."""
