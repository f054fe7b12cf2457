"""Tiles of a graph, by which tensor cores multiply, and whether they pay."""
