"""Several runs beside each other: the list of runs, and the page that compares them."""
