"""What both services need: configuration, logs, metrics, weights as tensors, shutdown."""
