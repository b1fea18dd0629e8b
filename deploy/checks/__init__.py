"""Check files, ports, machine and functions before anything heavy starts."""
