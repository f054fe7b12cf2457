"""The graph structure and what is prepared from it."""
