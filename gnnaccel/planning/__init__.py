"""What is done to a graph ahead of time, measured on it and said of it."""
