"""The command line: `python -m flexmasks demo`, `list`, `show NAME [--param value]`, `gallery OUT`, `bench WHAT`."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import os
import sys
from typing import Any

from tabulate import tabulate

from flexmasks.pictures.pages import page
from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.definitions import definition
from flexmasks.spec.registry import list_masks, list_scores


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flexmasks", description="Attention masks for FlexAttention.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="run, check, time and draw grouped_tril attention on this machine")
    importer = argparse.ArgumentParser(add_help=False)
    importer.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module first, which registers masks or scores of yours; may be repeated",
    )
    lister = commands.add_parser("list", help="list the masks and scores", parents=[importer])
    lister.add_argument("--markdown", action="store_true", help="as Markdown, the pages of masks and scores")
    shower = commands.add_parser(
        "show",
        help="draw a mask or a score, with its documentation",
        parents=[importer],
        epilog="Its parameters: --name value, "
        "the value as in Python: --window 64, --seq-lens [300,100], --causal True. By default those of an example.",
    )
    shower.add_argument("name", help="a mask's or score's name")
    shower.add_argument("--length", type=int, help="number of queries (default: as the parameters suggest, or 4096)")
    shower.add_argument("--kv-length", type=int, help="number of keys (default: as many)")
    shower.add_argument("--block-size", type=int, help="default 128, single elements for short lengths")
    shower.add_argument("-b", type=int, default=0, help="the batch element to draw")
    shower.add_argument("--head", type=int, default=0, help="the head to draw")
    shower.add_argument("--save", metavar="FILE", help="write the picture there: .svg, .html, .txt, .pdf or .png")
    maker = commands.add_parser("gallery", help="write a page of all masks and scores", parents=[importer])
    maker.add_argument("out", metavar="OUT", help="the file to write, or a folder for index.html")
    bencher = commands.add_parser("bench", help="measure this machine", parents=[importer])
    bencher.add_argument(
        "what",
        choices=["blocks", "softmax", "attention"],
        help="blocks: finding block masks, against create_block_mask; softmax: the masked softmax, against torch; "
        "attention: masks and scores, against flex_attention, SDPA and what else is installed",
    )
    bencher.add_argument(
        "--masks",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of blocks and attention: only these, names of the usual table or of any registered mask, "
        "which is measured at its example",
    )
    bencher.add_argument(
        "--scores", nargs="+", default=[], metavar="NAME", help="of attention: registered scores, under causal"
    )
    bencher.add_argument(
        "--all",
        action="store_true",
        help="of blocks and attention: every registered mask, of attention every score, too, each at its example",
    )
    bencher.add_argument(
        "--lengths",
        nargs="+",
        type=_positive,
        default=[],
        metavar="N",
        help="of blocks and attention: numbers of tokens",
    )
    bencher.add_argument("--device", help="cuda or cpu (default: a GPU where there is one)")
    bencher.add_argument("--json", metavar="FILE", help="write the figures there, as they come")
    bencher.add_argument("--resume", action="store_true", help="keep the figures of FILE, and measure what it lacks")
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "show":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if getattr(arguments, "modules", None):
            _import(arguments.modules)
        if arguments.command == "demo":
            from flexmasks.bench.demo import main as demo

            demo()
        elif arguments.command == "list":
            print(tables(arguments.markdown))
        elif arguments.command == "bench":
            if arguments.all and (arguments.masks or arguments.scores):
                parser.error("--all takes no --masks and no --scores")
            return 1 if _bench(parser, arguments).get("failed") else 0
        elif arguments.command == "gallery":
            from flexmasks.pictures.gallery import gallery

            print(gallery(arguments.out))
        else:
            _show(arguments, _parameters(rest))
        sys.stdout.flush()
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read it, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def tables(markdown: bool = False) -> str:
    """Return the tables of masks and scores, as text or as the Markdown of their pages."""
    listed = (("mask", list_masks()), ("score", list_scores()))
    if markdown:
        return "\n\n".join(page(kind, entries) for kind, entries in listed)
    return "\n\n".join(
        tabulate(
            [(entry.signature, entry.summary, entry.source, entry.peers) for entry in entries],
            headers=[kind, "meaning", "source", "in other libraries"],
            maxcolwidths=[30, 50, 30, 40],
        )
        for kind, entries in listed
    )


def _bench(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a benchmark."""
    where = {"device": arguments.device, "file": arguments.json}
    if arguments.resume and arguments.json is None:
        parser.error("--resume goes on with a FILE: pass --json FILE")
    if arguments.what == "softmax":
        from flexmasks.bench.softmax import softmax

        if arguments.masks or arguments.scores or arguments.all or arguments.lengths or arguments.resume:
            parser.error("bench softmax takes no --masks, --scores, --all, --lengths and --resume")
        return softmax(**where)
    where["resume"] = arguments.resume
    if arguments.what == "attention":
        from flexmasks.bench.attention import bench

        return bench(arguments.masks, arguments.scores, registry=arguments.all, lengths=arguments.lengths, **where)
    from flexmasks.bench.blocks import blocks

    if arguments.scores:
        parser.error("bench blocks takes no --scores")
    return blocks(arguments.lengths, arguments.masks, registry=arguments.all, **where)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _import(modules: list[str]) -> None:
    sys.path.insert(0, "")  # where this is called as a command, modules of the current folder are not found yet
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(f"flexmasks: --import {module}: {error}.") from error


def _show(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    from flexmasks.pictures.picture import draw

    name, length = arguments.name, arguments.length or 4096
    entries = [("mask", m) for m in list_masks()] + [("score", s) for s in list_scores()]
    named = [(kind, e) for kind, e in entries if e.name == name]  # a mask and a score may share a name
    if not named:
        definition("score" if difflib.get_close_matches(name, [s.name for s in list_scores()]) else "mask", name)
    for kind, entry in named:
        found = definition(kind, name)
        complete = all(n in given for n, p in found.parameters.items() if p.required) and given
        params = given if complete or not found.example else {**found.example(length), **given}
        shown = ", ".join(f"{n}={v!r:.60}" for n, v in params.items())
        print(f"{kind} {entry.signature}\n\n{found.doc}\n\nhere {name}({shown})\n")
        picture = draw(
            get_mask(name, **params) if kind == "mask" else get_score(name, **params),
            arguments.length or (None if complete else length),
            arguments.kv_length,
            b=arguments.b,
            h=arguments.head,
            block_size=arguments.block_size,
        )
        print(f"{picture}\n")
        if arguments.save and (kind, entry) == named[0]:
            print(f"written to {picture.save(arguments.save)}\n")


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
