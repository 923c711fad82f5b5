"""Updates of the rows of a table that a sparse gradient names."""
