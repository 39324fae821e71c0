"""Training: batches from the buffer, gradient steps, weight sync, evaluation, checkpoints."""
