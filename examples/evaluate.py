"""Evaluate arms (draft vocabularies and trees) over all turns of Spec-Bench, HumanEval or any prompts of their form.

    accelerate launch examples/evaluate.py --suite paper --target HuggingFaceTB/SmolLM2-135M-Instruct \
        --drafter <folder> --data <folder> --frequency_list ids.json --calibrated_list emitted.json \
        --coral <router> --dynaspec <router> --output results/smollm2

One or many processes on any number of hosts share the prompts. (Several on CPUs: `accelerate launch --multi_gpu
--num_processes 2` does without GPUs; with `--cpu` accelerate starts one, unless MPI is there.) An interrupted run goes
on where it stopped. The output folder gets one JSON-lines file for each arm in the form of Spec-Bench, and
provenance.json; `microspec report` makes tables and figures of it, `microspec compare` sets two such folders against
each other. `microspec_hf.evaluation.arms` lists the arms and suites.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from measuring import SHORTEN_TEXT, Options, Pair, load, option, precision, require_cost, start
from transformers import HfArgumentParser

from microspec_hf import TreeConfig
from microspec_hf.evaluation.answers import Answerer, Decoding
from microspec_hf.evaluation.arms import Arm, Resources, parse_arms
from microspec_hf.evaluation.runner import evaluate
from microspec_hf.evaluation.widened import COSTS, match_depth, widen


@dataclass
class Arguments(Options):
    """Command-line options."""

    cost: str | None = option(f"Widen the pair to the cost of a large one: {', '.join(COSTS)}.", default=None)
    deep: str = option("A target with too many layers: refuse, spread or shorten.", default="refuse")
    suite: str | None = option("Suites of arms, commas between: paper, static-sizes, window, ...", default=None)
    arms: str | None = option("Further arms, commas between.", default=None)
    max_new_tokens: int = option("Length limit of a turn's answer, in tokens.", default=1024)
    temperature: float = option("0: greedy; else samples from the whole distribution.", default=0.0)
    seed: int = option("Of sampling.", default=0)
    frequency_list: str | None = option("Ids by frequency: fr-spec, dynaspec's core, floors.", default=None)
    calibrated_list: str | None = option("Ids by the target's emissions: vocabtrim.", default=None)
    drafter_list: str | None = option("Ids by the drafter's proposals: vocabtrim-drafter.", default=None)
    coral: str | None = option("Folder of CORAL's router.", default=None)
    dynaspec: str | None = option("Folder of DynaSpec's router.", default=None)
    time_drafts: bool = option(
        "Measure how long drafting takes; on a GPU rounds then wait for each other.", default=False
    )

    def chosen_arms(self) -> list[Arm]:
        """What --suite and --arms name."""
        resources = Resources(
            tree=TreeConfig(depth=self.depth, top_k=self.top_k, num_nodes=self.nodes),
            frequency_list=self.frequency_list,
            calibrated_list=self.calibrated_list,
            drafter_list=self.drafter_list,
            coral=self.coral,
            dynaspec=self.dynaspec,
            time_drafts=self.time_drafts,
        )
        return parse_arms(_names(self.arms), _names(self.suite), resources)


def main(arguments: Arguments) -> None:
    """Evaluate, and say where the results are."""
    if arguments.output is None:
        raise SystemExit("--output is needed: the folder of the results.")
    # Whatever is wrong with the request is said before anything is loaded.
    if arguments.cost is not None:
        require_cost(arguments.cost, arguments.deep)
    arms, prompts = arguments.chosen_arms(), arguments.prompts()
    decoding = Decoding(arguments.max_new_tokens, arguments.temperature, arguments.seed)
    state: PartialState = start()
    answerer = Answerer(*loaded(state, arguments), decoding)
    record = evaluate(
        answerer,
        prompts,
        arms,
        Path(arguments.output),
        {"command": "evaluate"} | asdict(arguments),
        processes=state,
        gather=gather_object,
    )
    if state.is_main_process:
        skipped = record["skipped"]["longer than the context"]
        print(
            f"{record['prompts']} prompts, {len(arms)} arms; skipped {skipped} prompts longer than the context, ",
            end="",
        )
        print(f"left out {record['turns_left_out']} later turns without room.")
        print(f"Wrote {arguments.output}")


def loaded(state: PartialState, arguments: Arguments) -> Pair:
    """The pair; with --cost it is loaded in float32 and widened, so that weights are rounded once."""
    if arguments.cost is None:
        return load(state, arguments)
    dtype = precision(arguments.dtype)
    pair = load(state, replace(arguments, dtype="float32"))
    ids = pair.tokenizer(SHORTEN_TEXT, return_tensors="pt")["input_ids"].to(pair.model.device)
    model, shape = match_depth(pair.model, arguments.cost, arguments.deep, ids)
    target, drafter = widen(model, pair.drafter, shape, dtype)
    return Pair(target, pair.tokenizer, drafter)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())  # type: ignore[arg-type]
