"""The run over prompts and arms: shared by processes, interrupted and taken up again, each answer once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from microspec_hf import sessions
from microspec_hf.evaluation.answers import Answerer
from microspec_hf.evaluation.arms import Arm
from microspec_hf.evaluation.journal import Journal
from microspec_hf.evaluation.prompts import Prompt
from microspec_hf.evaluation.provenance import digest, pair_settings, provenance

PROVENANCE = "provenance.json"
UNFINISHED = "unfinished"


class Processes(Protocol):
    """What the run asks of `accelerate.PartialState`."""

    process_index: int
    num_processes: int

    @property
    def is_main_process(self) -> bool: ...

    def wait_for_everyone(self) -> None: ...


@dataclass(frozen=True)
class Alone:
    """The only process."""

    process_index: int = 0
    num_processes: int = 1

    @property
    def is_main_process(self) -> bool:
        return True

    def wait_for_everyone(self) -> None:
        """Nobody else is there."""


def evaluate(
    answerer: Answerer,
    prompts: Sequence[Prompt],
    arms: Sequence[Arm],
    output: Path,
    arguments: Mapping[str, Any],
    processes: Processes | None = None,
    gather: Callable[[list[Any]], list[Any]] = list,
    progress: bool = True,
) -> dict[str, Any]:
    """Answer every prompt under every arm, and write one JSON-lines file for each arm and `provenance.json`.

    Finished answers are kept in the folder `unfinished`, a file for each process, until the results are written: a
    rerun, with any number of processes, does the rest. All arms answer a prompt one after the other, and the order
    moves on by one from prompt to prompt, so that no arm always comes first.

    Args:
        arguments: what the evaluation was called with, for `provenance.json`.
        processes: this process among all; None: alone.
        gather: joins the lists of all processes, as `accelerate.utils.gather_object` does.
        progress: show the bar of the main process.

    Returns:
        What `provenance.json` holds; on other processes only the counts.

    Raises:
        ValueError: the folder holds a finished evaluation, or an unfinished one of other settings; no prompt is left.
    """
    me = processes or Alone()
    _refuse_finished(output)
    sessions.keep(len(arms) + 1)
    settings = pair_settings(answerer.model, answerer.drafter) | {"decoding": vars(answerer.decoding)}
    versions = {arm.name: digest(arm.config and arm.config.to_dict()) for arm in arms}
    too_long = {p.id: int(ids.shape[1]) for p in prompts if not answerer.fits(ids := answerer.first_ids(p))}
    kept = [prompt for prompt in prompts if prompt.id not in too_long]
    if not kept:
        raise ValueError(
            f"None of the {len(prompts)} prompts leaves room for {answerer.decoding.max_new_tokens} new tokens in the "
            f"target's context of {answerer.context}. Lower max_new_tokens."
        )
    folder = output / UNFINISHED
    files = sorted(folder.glob("*.jsonl"))
    found = [row for file in files for row in Journal(file, settings).rows]
    rows = [row["record"] for row in found if row["version"] == versions.get(row["record"]["arm"])]
    me.wait_for_everyone()  # nobody writes while others read
    done = {_key(row) for row in gather(rows)}
    journal = Journal(folder / f"{me.process_index}.jsonl", settings)

    wanted = [(n, prompt) for n, prompt in enumerate(kept) if any((arm.name, prompt.id) not in done for arm in arms)]
    mine = wanted[me.process_index :: me.num_processes]
    started = time.perf_counter()
    if mine:
        for arm in arms:
            answerer.warm_up(arm, mine[0][1])
    mine_left = [(arm, prompt) for n, prompt in mine for arm in _turned(arms, n) if (arm.name, prompt.id) not in done]
    new = []
    with tqdm(total=len(mine_left), desc="answers", disable=not (progress and me.is_main_process)) as bar:
        for arm, prompt in mine_left:
            record = answerer.answer(arm, prompt)
            journal.append({"version": versions[arm.name], "record": record})
            new.append(record)
            bar.update()
    records = {_key(row): row for row in gather(rows + new)}
    counts = {
        "prompts": len(kept),
        "skipped": {"longer than the context": len(too_long), "prompts": too_long},
        "turns_left_out": sum(row["turns_left_out"] for row in records.values()),
    }
    seconds = max(gather([time.perf_counter() - started]))
    origin = provenance(**arguments)
    if me.is_main_process:
        for arm in arms:
            lines = [json.dumps(records[arm.name, prompt.id], ensure_ascii=False) for prompt in kept]
            (output / arm.file_name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        origin |= counts | {
            "processes": me.num_processes,
            "seconds": round(seconds, 1),
            "decoding": vars(answerer.decoding),
            "arms": {arm.name: _without_folders(arm.describe()) for arm in arms},
        }
        (output / PROVENANCE).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    me.wait_for_everyone()
    for file in {folder / f"{me.process_index}.jsonl", *files}:
        file.unlink(missing_ok=True)
    me.wait_for_everyone()
    if me.is_main_process and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return origin | counts


def _turned(arms: Sequence[Arm], by: int) -> list[Arm]:
    by %= len(arms)
    return [*arms[by:], *arms[:by]]


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["arm"], row["question_id"]


def _refuse_finished(output: Path) -> None:
    if (output / PROVENANCE).exists():
        raise ValueError(f"{output} holds a finished evaluation already. Name another folder, or remove it first.")


def _without_folders(described: dict[str, Any]) -> dict[str, Any]:
    vocabulary = described.get("vocabulary")
    if vocabulary and vocabulary["router"]:
        vocabulary["router"] = Path(vocabulary["router"]).name
    return described
