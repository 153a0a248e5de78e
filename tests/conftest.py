"""Reference data outside the repository, for both hosts' tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def reference_frames(tmp_path):
    """Function that writes the first ``count`` frames of a reference data file, verbatim, to a file of its own.

    The folder of the data is named by the environment variable E2IP_DATA; the test is skipped without it.
    """
    root = os.environ.get("E2IP_DATA")

    def take(name: str, count: int) -> Path:
        if root is None:
            pytest.skip("E2IP_DATA is not set: it names the folder of reference DFT frames")
        source = Path(root) / name
        if not source.exists():
            pytest.skip(f"{source} is missing")
        lines = source.read_text().splitlines(keepends=True)
        end = 0
        for _ in range(count):
            end += int(lines[end]) + 2
        target = tmp_path / source.name
        target.write_text("".join(lines[:end]))
        return target

    return take
