"""The overlay engine: TOML files and command lines onto dataclasses, their schema and their reference."""
