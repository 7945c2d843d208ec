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
        """Go on with the file, or start anew: then what is there is replaced by the first `add`. A file to go on with
        may lack adapters, or have some that are gone. Raises `ValueError` if one was written with other settings."""
        self.path, self.settings, self.records = path, settings, list[Record]()
        self._is_new = not (resume and path.exists())
        if not self._is_new:
            self._read()

    def _read(self) -> None:
        text = self.path.read_text()
        text = text[: text.rfind("\n") + 1]  # the run may have been ended within a line
        self.path.write_text(text)
        first, *lines = text.splitlines()
        found, wanted = json.loads(first), self.settings
        if changed := _changed(found, wanted):
            raise ValueError(f"{self.path} was made with another {', '.join(changed)}; run without --resume")
        self.settings = {**wanted, "adapters": {**found["adapters"], **wanted["adapters"]}}
        if self.settings != found:
            self.path.write_text("\n".join([json.dumps(self.settings), *lines, ""]))
        self.records = [Record(**json.loads(line)) for line in lines]

    @property
    def done(self) -> set[Key]:
        return {(r.length, r.team, r.mode, r.question, r.agent) for r in self.records}

    def add(self, records: Iterable[Record]) -> None:
        """Append to the file and to `records`."""
        new = list(records)
        if self._is_new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.settings) + "\n")
            self._is_new = False
        with self.path.open("a") as file:
            file.writelines(json.dumps(record.as_dict()) + "\n" for record in new)
        self.records += new


def _changed(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of the settings that differ; an adapter that only one of the two knows does not."""
    flat = [{**settings, **settings["adapters"], "adapters": None} for settings in (found, wanted)]
    both = set(found["adapters"]) & set(wanted["adapters"])
    return sorted(name for name in (found.keys() | wanted.keys() | both) if flat[0].get(name) != flat[1].get(name))
