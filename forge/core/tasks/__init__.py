"""Tasks on arrival: valid fields, and the position in a data set."""
