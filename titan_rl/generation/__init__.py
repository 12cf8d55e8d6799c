"""Generators: engines that sample completions, and the contract between them and the rest."""
