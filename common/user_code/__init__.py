"""Functions of the user: found, loaded, hashed, and called in processes of their own."""
