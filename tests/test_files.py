"""Files and folders that appear whole or not at all, and locks."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from compressive_transformer.errors import CompressiveError
from compressive_transformer.files import locked


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "work.lock"
    with locked(file, "busy"), pytest.raises(CompressiveError, match="busy"), locked(file, "busy"):
        raise AssertionError
    with file.open("a") as other:  # as another process holds it
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CompressiveError, match="busy"), locked(file, "busy"):
            raise AssertionError
    with locked(file, "busy"):
        assert file.exists()
