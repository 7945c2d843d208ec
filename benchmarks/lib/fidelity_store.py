"""The file of records that a run grows and another one resumes: JSON Lines, the run's settings first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lib.fidelity_stats import Record

Key = tuple[str, str, str, str, str]
"""(length, team, mode, question, agent)."""


class RecordFile:
    """Records of one run. Every `add` is on the disk when it returns, so a run that was ended loses one batch."""

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        """Start the file anew, or go on with it. Raises `ValueError` if it was written with other settings."""
        self.path, self.records = path, list[Record]()
        if resume and path.exists():
            self._read(settings)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n")

    def _read(self, settings: dict[str, Any]) -> None:
        text = self.path.read_text()
        text = text[: text.rfind("\n") + 1]  # the run may have been ended within a line
        self.path.write_text(text)
        first, *lines = text.splitlines()
        found = json.loads(first)
        if found != settings:
            changed = sorted(key for key in found.keys() | settings.keys() if found.get(key) != settings.get(key))
            raise ValueError(f"{self.path} was made with another {', '.join(changed)}; run without --resume")
        self.records = [Record(**json.loads(line)) for line in lines]

    @property
    def done(self) -> set[Key]:
        return {(r.length, r.team, r.mode, r.question, r.agent) for r in self.records}

    def add(self, records: Iterable[Record]) -> None:
        """Append to the file and to `records`."""
        new = list(records)
        with self.path.open("a") as file:
            file.writelines(json.dumps(record.as_dict()) + "\n" for record in new)
        self.records += new
