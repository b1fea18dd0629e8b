"""Read what runs left behind; start no process."""
