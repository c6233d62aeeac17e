"""The command line: `python -m flexmasks demo`, `list`, `show NAME [--param value]`, `bench WHAT`."""

from __future__ import annotations

import argparse
import ast
import sys
from typing import Any

from tabulate import tabulate

from flexmasks.registry import Entry, definition, list_masks, list_scores

_COLUMNS = ("meaning", "source", "in other libraries")


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flexmasks", description="Attention masks for FlexAttention.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="run, check, time and draw grouped_tril attention on this machine")
    lister = commands.add_parser("list", help="list the masks and scores")
    lister.add_argument("--markdown", action="store_true", help="as the README's tables")
    shower = commands.add_parser(
        "show",
        help="draw a mask",
        epilog="A mask's parameters: --name value, "
        "the value as in Python: --window 64, --seq-lens [300,100], --causal True. By default those of an example.",
    )
    shower.add_argument("name", help="a mask's or score's name")
    shower.add_argument("--length", type=int, default=4096, help="number of queries (default 4096)")
    shower.add_argument("--kv-length", type=int, help="number of keys (default: as many)")
    shower.add_argument("--block-size", type=int, help="default 128, single elements for short lengths")
    shower.add_argument("-b", type=int, default=0, help="the batch element to draw")
    shower.add_argument("--head", type=int, default=0, help="the head to draw")
    bencher = commands.add_parser("bench", help="measure this machine")
    bencher.add_argument(
        "what",
        choices=["blocks", "softmax", "attention"],
        help="blocks: finding block masks, against create_block_mask; softmax: the masked softmax, against torch; "
        "attention: masks and scores, against flex_attention, SDPA and what else is installed",
    )
    bencher.add_argument("--masks", nargs="+", metavar="NAME", help="of blocks and attention: only these masks")
    bencher.add_argument("--lengths", nargs="+", type=int, metavar="N", help="of blocks: numbers of tokens")
    bencher.add_argument("--device", help="cuda or cpu (default: a GPU where there is one)")
    bencher.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "show":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command == "demo":
            from flexmasks.demo import main as demo

            demo()
        elif arguments.command == "list":
            print(tables(arguments.markdown))
        elif arguments.command == "bench" and arguments.what == "softmax":
            from flexmasks.bench_softmax import softmax

            if arguments.masks or arguments.lengths:
                parser.error("bench softmax takes no --masks and no --lengths")
            softmax(arguments.device, arguments.json)
        elif arguments.command == "bench" and arguments.what == "attention":
            from flexmasks.bench_attention import bench

            if arguments.lengths:
                parser.error("bench attention takes no --lengths")
            bench(arguments.masks, arguments.device, arguments.json)
        elif arguments.command == "bench":
            from flexmasks.bench import blocks

            blocks(arguments.lengths, arguments.masks, arguments.device, arguments.json)
        else:
            _show(arguments, _parameters(rest))
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def tables(markdown: bool = False) -> str:
    """The tables of masks and scores."""
    found = []
    for title, entries in (("mask", list_masks()), ("score", list_scores())):
        if markdown:
            rows = [(f"`{e.signature}`", *(text.replace("|", "\\|") for text in _said(e))) for e in entries]
            found.append(tabulate(rows, headers=[title, *_COLUMNS], tablefmt="github"))
        else:
            rows = [(e.signature, *_said(e)) for e in entries]
            found.append(tabulate(rows, headers=[title, *_COLUMNS], maxcolwidths=[30, 50, 30, 40]))
    return "\n\n".join(found)


def _said(entry: Entry) -> tuple[str, ...]:
    return entry.summary, entry.source, entry.peers


def _show(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    from flexmasks.picture import show

    name, length = arguments.name, arguments.length
    masks, scores = {m.name: m for m in list_masks()}, {s.name: s for s in list_scores()}
    if name in scores:
        print(f"score {scores[name].signature}\n\n{definition('score', name).doc}\n")
        if name not in masks:
            return
    found = definition("mask", name)
    params = {**(found.example(length) if found.example else {}), **given}
    shown = ", ".join(f"{n}={v!r:.60}" for n, v in params.items())
    print(f"mask {masks[name].signature}\n\n{found.doc}\n\nhere {name}({shown})\n")
    show(
        name,
        length,
        arguments.kv_length,
        b=arguments.b,
        h=arguments.head,
        heads=arguments.head + 1,
        block_size=arguments.block_size,
        **params,
    )


def _parameters(words: list[str]) -> dict[str, Any]:
    """`--name value` pairs; a value is a Python literal, `3`, `[3,4]`, `True`, else a word."""
    if len(words) % 2 or not all(w.startswith("--") for w in words[::2]):
        raise ValueError(f"flexmasks: parameters are given as --name value, got {' '.join(words)!r}.")
    return {n[2:].replace("-", "_"): _literal(v) for n, v in zip(words[::2], words[1::2], strict=True)}


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


if __name__ == "__main__":
    sys.exit(main())
