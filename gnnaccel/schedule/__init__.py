"""In what order, by which kernel and in which pieces the rows of a graph are worked on."""
