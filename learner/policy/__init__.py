"""The network that is trained: loading, computing and saving it."""
