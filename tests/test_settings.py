"""Measured settings: the look-up by class of program, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutesuper.errors import FormatError
from cutesuper.skeletons.attention.settings import SETTINGS as ATTENTION
from cutesuper.skeletons.matmul.settings import SETTINGS as MATMUL
from cutesuper.skeletons.rows.settings import SETTINGS, stage_limit, walks_long
from cutesuper.targets import B200, H200, TARGETS
from cutesuper.targets.settings import Decision, Settings
from cutesuper.torch.ops.classes import class_of

DECISIONS = {
    "way": Decision(("length", "wide"), {"threads": 64, "ring": 0}),
    "tile": Decision(("length",), {"rows": (8, 16)}),
}
ENTRY = {"when": {"length": [None, 100], "wide": True}, "use": {"threads": 128}, "why": "12 us, 13"}
FILE = {"format": "measured_settings", "version": 1}


def settings_of(tmp_path: Path, *entries: Any, **fields: Any) -> Settings:
    """The settings of a file with these entries of the decision ``way``."""
    data = FILE | {"decisions": {"way": list(entries)}} | fields
    (tmp_path / "sm90").mkdir(exist_ok=True)
    (tmp_path / "sm90" / "toy.json").write_text(json.dumps(data))
    return Settings("toy", DECISIONS, tmp_path)


@pytest.mark.parametrize(
    ("length", "wide", "knobs"),
    [
        (100, True, {"threads": 128, "ring": 0}),
        (100, False, {"threads": 64, "ring": 1}),
        (101, True, {"threads": 64, "ring": 1}),
        (0.5, 1, {"threads": 128, "ring": 0}),
        (500, True, {"threads": 64, "ring": 0}),
    ],
)
def test_the_first_entry_that_holds_is_used(
    tmp_path: Path, length: float, wide: bool, knobs: dict[str, int]
) -> None:
    second = {"when": {"length": [None, 200]}, "use": {"ring": True}, "why": "a ring: 5 us, 6"}
    found = settings_of(tmp_path, ENTRY, second)
    assert found.choose(H200, "way", length=length, wide=wide) == knobs


def test_a_ladder_is_a_list_of_values(tmp_path: Path) -> None:
    ladder = {"when": {"length": [None, 100]}, "use": {"rows": [64, 32]}, "why": "5 us, 6"}
    found = settings_of(tmp_path, decisions={"tile": [ladder]})
    assert found.choose(H200, "tile", length=100) == {"rows": (64, 32)}
    assert found.choose(H200, "tile", length=101) == {"rows": (8, 16)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, r"use\.rows: 3 is not a list of integers"),
        ([], r"use\.rows: \[\] is not a list of integers"),
        ([8, "x"], r"use\.rows: 'x' is not an integer from 0 on"),
    ],
)
def test_bad_ladders_are_named(tmp_path: Path, rows: Any, message: str) -> None:
    ladder = {"when": {}, "use": {"rows": rows}, "why": "5 us, 6"}
    with pytest.raises(FormatError, match=message):
        settings_of(tmp_path, decisions={"tile": [ladder]})


def without(field: str) -> dict[str, Any]:
    return {k: v for k, v in ENTRY.items() if k != field}


REFUSED: dict[str, tuple[Any, str]] = {
    "not an object": (3, r"decisions\.way\[0\]: not an object"),
    "no measurement": (without("why"), r"decisions\.way\[0\]: missing or unknown fields: why"),
    "empty measurement": (ENTRY | {"why": ""}, r"way\[0\]\.why: the measurement must be said"),
    "unknown feature": (
        ENTRY | {"when": {"width": 3}},
        r"way\[0\]\.when\.width: unknown; there is",
    ),
    "unknown knob": (ENTRY | {"use": {"lanes": 3}}, r"way\[0\]\.use\.lanes: unknown; there is thr"),
    "negative": (ENTRY | {"use": {"threads": -1}}, r"use\.threads: -1 is not an integer from 0 on"),
    "fraction": (ENTRY | {"use": {"threads": 1.5}}, r"use\.threads: 1\.5 is not an integer"),
    "text": (ENTRY | {"when": {"length": "long"}}, r"when\.length: 'long' is neither a number nor"),
    "three ends": (ENTRY | {"when": {"length": [1, 2, 3]}}, r"\[1, 2, 3\] is neither a number nor"),
    "empty range": (ENTRY | {"when": {"length": [5, 4]}}, r"\[5, 4\] is an empty range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_entries_are_named(tmp_path: Path, name: str) -> None:
    entry, message = REFUSED[name]
    with pytest.raises(FormatError, match=rf"sm90/toy\.json: .*{message}.*install the package"):
        settings_of(tmp_path, entry)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"toy\.json: no such file"):
        Settings("toy", DECISIONS, tmp_path)
    with pytest.raises(FormatError, match=r"format: not 'measured_settings' of version 1"):
        settings_of(tmp_path, ENTRY, version=2)
    with pytest.raises(FormatError, match=r"decisions\.other\[0\]: no decision of way, tile"):
        settings_of(tmp_path, decisions={"other": [ENTRY]})
    (tmp_path / "sm90" / "toy.json").write_text("{")
    with pytest.raises(FormatError, match=r"toy\.json: .*line 1"):
        Settings("toy", DECISIONS, tmp_path)


def test_every_architecture_needs_its_file(tmp_path: Path) -> None:
    found = settings_of(tmp_path, ENTRY)
    with pytest.raises(FormatError, match=r"sm130/toy\.json: no such file, which h200 needs"):
        found.choose(replace(H200, settings="sm130"), "way", length=1, wide=True)


def test_the_shipped_settings() -> None:
    assert {stage_limit(t) for t in TARGETS.values()} == {32768}
    assert [walks_long(B200, 1, n) for n in (16384, 16385)] == [False, True]
    assert [walks_long(H200, 2, n) for n in (8192, 8193)] == [False, True]
    assert [class_of("rows", n) for n in (1, 512, 513, 4096, 4097)] == [128, 128, 2048, 2048, 16384]
    assert SETTINGS.choose(H200, "sliced", rows=512) == {"sliced": 1}
    assert MATMUL.choose(B200, "rows", rows=64) == {"least": 0, "most": 0}
    assert MATMUL.choose(H200, "rows", rows=65) == {"least": 48, "most": 256}
    assert MATMUL.choose(H200, "ring", dependent_launch=True)["bytes"] == 0
    few = {"rows": 16, "depth": 128, "cluster": 1}
    assert [ATTENTION.choose(H200, "resident", waves=n, **few)["blocks"] for n in (1, 2)] == [1, 2]
