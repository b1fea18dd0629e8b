"""Write the files by which a cluster's scheduler starts a run's services."""
