"""Runs beside each other in folders of their own: the trials of sweeps and studies, and the processes that make them."""
