"""Pages for people: typed blocks of plain text and figures, and the templates that make HTML of them."""
