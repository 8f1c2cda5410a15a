"""Coverage-guided fuzzing of all file readers: each file must be read or rejected with a one-line error.

    pip install atheris
    python benchmarks/soak_fuzz.py --seconds 60 --out benchmarks/soak_fuzz.json

Atheris (libFuzzer) changes the bytes of each file that the package reads, beginning with one as it should be, and keeps
what reaches new lines. Anything but a reading or a `CompressiveError` of one line ends it, and the content is written
down. The readers are those of tests/test_hostile.py.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STATS = {"executions": r"stat::number_of_executed_units: *(\d+)", "inputs kept": r"stat::new_units_added: *(\d+)"}
COVERED = r"cov: (\d+)"
"""Branches of the package that were reached, as libFuzzer counts them."""


def fuzz(name: str, folder: Path, seconds: int) -> None:
    """Fuzz the reader of one file in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["compressive_transformer"]):
        sys.path.insert(0, str(HERE.parent / "tests"))
        from test_hostile import FILES, assert_read_or_refused, write_files
    if not name:
        write_files(folder)
        print(json.dumps(list(FILES)))
        return
    with tempfile.TemporaryDirectory() as seeds:
        original = (folder / name).read_bytes()
        Path(seeds, "original").write_bytes(original)
        limits = [f"-max_total_time={seconds}", f"-max_len={2 * len(original)}", "-print_final_stats=1", "-timeout=60"]
        atheris.Setup(
            [sys.argv[0], *limits, "-rss_limit_mb=8000", f"-artifact_prefix={folder}/", seeds],
            lambda content: assert_read_or_refused(folder, name, content),
        )
        atheris.Fuzz()


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this script in a new process."""
    return subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)


def result(name: str, output: str, status: int) -> dict[str, Any]:
    """Return the final statistics of libFuzzer."""
    counts = {what: int(found[-1]) for what, pattern in STATS.items() if (found := re.findall(pattern, output))}
    covered = [int(number) for number in re.findall(COVERED, output)]
    return {
        "file": name,
        "failed": bool(status),
        **counts,
        "branches": {"at first": covered[0], "at the end": covered[-1]} if covered else None,
        **({"end of output": output[-2000:]} if status else {}),
    }


def main() -> None:
    """Fuzz each file for the given time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each file")
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        fuzz(given.file, given.folder, given.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        made = started("--folder", folder, "--file", "")
        if made.returncode:
            sys.exit(made.stderr)
        results = []
        for name in json.loads(made.stdout.splitlines()[-1]):
            done = started("--folder", folder, "--file", name, "--seconds", str(given.seconds))
            results.append(result(name, done.stderr, done.returncode))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    made = {
        "command": f"python benchmarks/soak_fuzz.py --seconds {given.seconds}",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    text = json.dumps({**made, "files": results}, indent=1) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
