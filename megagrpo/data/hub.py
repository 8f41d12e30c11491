"""Data sets of the Hugging Face hub, by their names, as folders on this machine."""

from __future__ import annotations

from pathlib import Path

from megagrpo.errors import DataError, Problem, first_line

PATTERNS = ["*.parquet", "*.json", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.arrow"]


def downloaded(name: str) -> Path:
    """The folder with the data files of a data set, from the local cache or the hub. Raises DataError.

    HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT are honoured.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=PATTERNS))
    except (OSError, HFValidationError, IncompleteSnapshotError) as error:
        given = f"{name}: {type(error).__name__}: {first_line(error)}"
        needed = "a data set in the local cache, or one that can be downloaded"
        fix = "check the name, the network, HF_HUB_OFFLINE and HF_TOKEN; or copy its files here (--source)"
        raise DataError(Problem("the Hugging Face hub does not give the data set", given, needed, fix)) from None
