from __future__ import annotations

from pathlib import Path

import pytest

from microspec_hf.evaluation.journal import Journal

SETTINGS = {"dtype": "float32", "sizes": (1, 2)}


def test_keeps_rows_for_the_next_run(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "j.jsonl"
    journal = Journal(file, SETTINGS)
    assert journal.rows == []
    journal.append({"id": "a"})
    journal.append({"id": "b"})
    assert Journal(file, SETTINGS).rows == [{"id": "a"}, {"id": "b"}]


def test_passes_over_what_an_interruption_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    Journal(file, SETTINGS).append({"id": "a"})
    with file.open("a") as out:
        out.write('{"id": "b", "diff')
    journal = Journal(file, SETTINGS)
    assert journal.rows == [{"id": "a"}]
    journal.append({"id": "c"})
    assert Journal(file, SETTINGS).rows == [{"id": "a"}, {"id": "c"}]


def test_an_interrupted_first_line_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    file.write_text('{"sett')
    Journal(file, SETTINGS).append({"id": "a"})
    assert Journal(file, SETTINGS).rows == [{"id": "a"}]
    with pytest.raises(ValueError, match="dtype"):
        Journal(file, SETTINGS | {"dtype": "float16"})


def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    one, two = Journal(file, SETTINGS), Journal(file, SETTINGS)
    one.append({"id": "a"})
    two.append({"id": "b"})
    one.append({"id": "c"})
    assert [row["id"] for row in Journal(file, SETTINGS).rows] == ["a", "b", "c"]


def test_refuses_rows_of_other_settings_by_name(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    Journal(file, SETTINGS)
    with pytest.raises(ValueError, match=r"j\.jsonl .*these differ: dtype, threads\. Delete it"):
        Journal(file, {"dtype": "bfloat16", "sizes": [1, 2], "threads": 2})


def test_without_a_file_nothing_is_kept() -> None:
    journal = Journal(None, SETTINGS)
    journal.append({"id": "a"})
    assert journal.rows == []
