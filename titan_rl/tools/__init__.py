"""Command-line helpers around training: preparing model directories."""
