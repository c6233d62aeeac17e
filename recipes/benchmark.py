"""Benchmarks of the library: `python recipes/benchmark.py WHAT` measures, prints a table and writes a results file."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from flexmasks.__main__ import import_modules, import_parser, positive

WHAT = {
    "blocks": "finding block masks, against create_block_mask",
    "softmax": "the masked softmax, against torch",
    "attention": "masks and scores, against flex_attention, SDPA and other libraries",
    "steps": "loops whose masks have new tensors at every step, against torch",
    "documents": "packed documents, against varlen kernels and compiled flex",
    "choice": "all backends, for the table of times by which the fastest is chosen",
    "intervals": "interval masks of cuDNN, against the backends here",
    "invariant": "the same bits in any batch and packing, against calls that do not promise them",
    "dropout": "calls that drop attention weights, against calls that do not and SDPA's",
    "data": "masks as functions and as data, in the same kernels",
    "serve": "decoding with new lengths at every step, against torch",
    "models": "Hugging Face models of real shapes in training and generation",
    "ranks": "a sequence over several GPUs, against one and against torch",
    "trees": "training on answers to shared prompts, as trees and without sharing",
    "rollouts": "a policy step on 4, 8 and 16 answers to each prompt, as trees and padded",
    "diffusers": "attention as diffusers' models call it, against diffusers' own backends",
    "biases": "short sequences with a bias that learns, against SDPA and compiled flex",
    "tangents": "forward mode (torch.func.jvp) against forward passes, and second order",
    "sdpa": "masks as tensors, by flexmasks.sdpa and by torch's SDPA",
    "topk": "keys that an indexer chose for each query, against dense additive masks",
    "wild": "masks of other projects, planned and computed, against torch",
    "limits": "sinks, head sizes, small and first calls, soft-caps, neighborhoods",
}
# Options of some benchmarks; the others measure steps that `--only` chooses.
TAKES = {
    "blocks": ("masks", "all", "lengths", "resume"),
    "softmax": ("only", "resume"),
    "attention": ("masks", "scores", "all", "lengths", "resume"),
}
BY_STEPS = ("only", "quick", "resume")


def main(words: list[str] | None = None) -> int:
    """Run a benchmark and return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(words)
    takes = TAKES.get(arguments.what, BY_STEPS)
    for name in ("masks", "scores", "all", "lengths", "only", "quick", "resume"):
        if getattr(arguments, name) and name not in takes:
            parser.error(f"{arguments.what} takes no --{name}")
    if arguments.all and (arguments.masks or arguments.scores):
        parser.error("--all takes no --masks and no --scores")
    if arguments.resume and arguments.json is None:
        parser.error("--resume continues a FILE: pass --json FILE")
    try:
        import_modules(arguments.modules)
        return 1 if _run(arguments).get("failed") else 0
    except (ValueError, TypeError, MemoryError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark that is named, and return its results."""
    module = importlib.import_module(f"benchmarks.{arguments.what}")
    options = {"device": arguments.device, "file": arguments.json}
    if arguments.what == "softmax":
        results: dict[str, Any] = module.softmax(only=arguments.only, resume=arguments.resume, **options)
    elif arguments.what == "blocks":
        results = module.blocks(
            arguments.lengths, arguments.masks, registry=arguments.all, resume=arguments.resume, **options
        )
    elif arguments.what == "attention":
        results = module.bench(
            arguments.masks,
            arguments.scores,
            lengths=arguments.lengths,
            registry=arguments.all,
            resume=arguments.resume,
            **options,
        )
    else:
        from benchmarks.results import run_benchmark

        results = run_benchmark(
            module.BENCHMARK, arguments.only, quick=arguments.quick, resume=arguments.resume, **options
        )
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python recipes/benchmark.py",
        usage="python recipes/benchmark.py WHAT [options]",
        description="Measure the speed of this machine.",
        epilog="\n".join(["what can be measured:", *(f"  {what:11}{text}" for what, text in WHAT.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[import_parser()],
    )
    several: dict[str, Any] = {"nargs": "+", "default": []}
    parser.add_argument("what", metavar="WHAT", choices=WHAT, help=", ".join(WHAT))
    parser.add_argument(
        "--masks",
        **several,
        metavar="NAME",
        help="with blocks and attention: only these masks, of the usual table or registered, at their examples",
    )
    parser.add_argument(
        "--scores", **several, metavar="NAME", help="with attention: registered scores, under the causal mask"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="with blocks and attention: every registered mask, and with attention every score, at its example",
    )
    parser.add_argument(
        "--lengths", **several, type=positive, metavar="N", help="with blocks and attention: numbers of tokens"
    )
    parser.add_argument("--only", **several, metavar="TEXT", help="only what has one of these texts in its description")
    parser.add_argument("--quick", action="store_true", help="few and small steps, to try the benchmark itself")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if the machine has one)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file, after each step")
    parser.add_argument("--resume", action="store_true", help="keep the figures of FILE, and measure the missing ones")
    return parser


if __name__ == "__main__":
    sys.exit(main())
