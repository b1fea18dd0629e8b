"""Hold and compute the network that is trained."""
