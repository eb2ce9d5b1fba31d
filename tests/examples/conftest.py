import sys
from pathlib import Path

# As a run file's folder is for the run: the example's modules import each other by their bare names.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pick_place"))
