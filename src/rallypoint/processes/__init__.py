"""Starting, watching, stopping and listening to worker processes."""
