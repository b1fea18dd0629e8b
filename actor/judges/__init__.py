"""The judge: any OpenAI-compatible server that rewards and environments ask, within the limits of `[judge]`."""
