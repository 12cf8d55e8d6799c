"""Write docs/symbols.md from titan_rl/titan/symbols.py."""

from pathlib import Path

from titan_rl.titan.symbols import markdown

if __name__ == "__main__":
    Path(__file__).parents[1].joinpath("docs", "symbols.md").write_text(markdown(), encoding="utf-8")
