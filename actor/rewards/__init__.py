"""Rewards: the functions, the ways to call them, and the calls that are tried again."""
