"""Talk with the actors about leases, behind one lock."""
