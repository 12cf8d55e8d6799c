"""Makes this directory's helper modules importable by name, as a user's module would be."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
