"""Environments: user functions that play episodes of several turns with the model, in processes beside the actor's."""
