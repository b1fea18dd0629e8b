"""The look at everything that can be looked at before something heavy starts."""
