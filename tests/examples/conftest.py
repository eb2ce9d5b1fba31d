import sys
from pathlib import Path

import pytest

# As a run file's folder is for the run: the example's modules import each other by their bare names.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pick_place"))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five demonstrations and two for validation, recorded once."""
    import pick_place_data

    folder = tmp_path_factory.mktemp("demonstrations") / "pick_place"
    pick_place_data.record(folder, episodes=5, val_episodes=2)
    return str(folder)
