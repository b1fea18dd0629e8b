"""Code that both services use: configuration, logs, metrics, weights as tensors, shutdown."""
