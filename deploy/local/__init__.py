"""Run on this machine: the services of a run started and ended, its devices, the quick start, notebooks."""
