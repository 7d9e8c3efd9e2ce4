import sys
from pathlib import Path

# Test helpers shared between folders.
sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))
