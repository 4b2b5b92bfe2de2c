"""What several test files share: the demo's data and model."""
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """Folder with {train,test}.parquet and model/, made once (or found in DEMO_DIR, which saves half a minute)."""
    if "DEMO_DIR" in os.environ:
        return Path(os.environ["DEMO_DIR"])
    folder = tmp_path_factory.mktemp("demo")
    script = Path(__file__).resolve().parent.parent / "prepare_data.py"
    subprocess.run([sys.executable, script, "demo", "--local_dir", folder], check=True, capture_output=True, timeout=300)
    return folder
