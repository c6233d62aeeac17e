"""The command line: `python -m flexmasks demo`, `list`, `show`, `gallery` and `bench`."""

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
    """Run a command and return the exit status."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "show":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    status = 0
    try:
        if getattr(arguments, "modules", None):
            _import(arguments.modules)
        if arguments.command == "demo":
            from flexmasks.bench.demo import main as demo

            demo()
        elif arguments.command == "list":
            print(tables(arguments.markdown))
        elif arguments.command == "bench":
            status = 1 if _bench(parser, arguments).get("failed") else 0
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
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flexmasks", description="Attention masks for FlexAttention.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="run, check, time and draw grouped_tril attention on this machine")
    import_parser = argparse.ArgumentParser(add_help=False)
    import_parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="first import a module that registers your own masks or scores; may be repeated",
    )
    list_parser = commands.add_parser("list", help="list the masks and scores", parents=[import_parser])
    list_parser.add_argument("--markdown", action="store_true", help="as Markdown: the pages of masks and scores")
    show_parser = commands.add_parser(
        "show",
        help="draw a mask or a score, with its documentation",
        parents=[import_parser],
        epilog="Parameters of the mask or score are given as --name value, with the value as in Python: --window 64, "
        "--seq-lens [300,100], --causal True. By default they are those of an example.",
    )
    show_parser.add_argument("name", help="name of a mask or a score")
    show_parser.add_argument(
        "--length", type=int, help="number of queries (default: as the parameters suggest, or 4096)"
    )
    show_parser.add_argument("--kv-length", type=int, help="number of keys (default: the number of queries)")
    show_parser.add_argument("--block-size", type=int, help="default: 128, or 1 for short lengths")
    show_parser.add_argument("-b", type=int, default=0, help="the batch element to draw")
    show_parser.add_argument("--head", type=int, default=0, help="the head to draw")
    show_parser.add_argument(
        "--save", metavar="FILE", help="write the picture to a .svg, .html, .txt, .pdf or .png file"
    )
    gallery_parser = commands.add_parser(
        "gallery", help="write a page of all masks and scores", parents=[import_parser]
    )
    gallery_parser.add_argument("out", metavar="OUT", help="the file to write, or a folder for index.html")
    _add_bench_arguments(commands.add_parser("bench", help="measure this machine", parents=[import_parser]))
    return parser


def _add_bench_arguments(bench_parser: argparse.ArgumentParser) -> None:
    bench_parser.add_argument(
        "what",
        choices=["blocks", "softmax", "attention", "steps", "data"],
        help="blocks: finding block masks, against create_block_mask; softmax: the masked softmax, against torch; "
        "attention: masks and scores, against flex_attention, SDPA and other installed libraries; steps: loops and "
        "training whose masks have new tensors at every step, against compiled torch; data: masks as functions and as "
        "data, in the same kernels",
    )
    several: dict[str, Any] = {"nargs": "+", "default": []}
    bench_parser.add_argument(
        "--masks",
        **several,
        metavar="NAME",
        help="with blocks and attention: only these masks, names of the usual table or of registered masks, "
        "which are measured at their examples",
    )
    bench_parser.add_argument(
        "--scores", **several, metavar="NAME", help="with attention: registered scores, under the causal mask"
    )
    bench_parser.add_argument(
        "--all",
        action="store_true",
        help="with blocks and attention: every registered mask, and with attention every score, at its example",
    )
    bench_parser.add_argument(
        "--lengths", **several, type=_positive, metavar="N", help="with blocks and attention: numbers of tokens"
    )
    bench_parser.add_argument(
        "--only",
        **several,
        metavar="TEXT",
        help="with steps and data: only what has one of these texts in its description",
    )
    bench_parser.add_argument("--quick", action="store_true", help="with steps and data: few and small steps")
    bench_parser.add_argument("--device", help="cuda or cpu (default: a GPU if the machine has one)")
    bench_parser.add_argument("--json", metavar="FILE", help="write the figures to a file, after each step")
    bench_parser.add_argument(
        "--resume", action="store_true", help="keep the figures of FILE, and measure the missing ones"
    )


def tables(markdown: bool = False) -> str:
    """Return the tables of masks and scores.

    The tables are text, or the Markdown of the pages of masks and scores.
    """
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
    """Run a benchmark and return its results."""
    if arguments.all and (arguments.masks or arguments.scores):
        parser.error("--all takes no --masks and no --scores")
    if arguments.resume and arguments.json is None:
        parser.error("--resume continues a FILE: pass --json FILE")
    if (arguments.only or arguments.quick) and arguments.what not in ("steps", "data"):
        parser.error(f"bench {arguments.what} takes no --only and no --quick")
    where: dict[str, Any] = {"device": arguments.device, "file": arguments.json}
    if arguments.what in ("steps", "data"):
        from flexmasks.bench.data import data
        from flexmasks.bench.steps import steps

        if arguments.masks or arguments.scores or arguments.all or arguments.lengths:
            parser.error(f"bench {arguments.what} takes no --masks, --scores, --all and --lengths")
        measure = steps if arguments.what == "steps" else data
        return measure(arguments.only, quick=arguments.quick, resume=arguments.resume, **where)
    if arguments.what == "softmax":
        from flexmasks.bench.softmax import softmax

        if arguments.masks or arguments.scores or arguments.all or arguments.lengths or arguments.resume:
            parser.error("bench softmax takes no --masks, --scores, --all, --lengths and --resume")
        return softmax(**where)
    where |= {"registry": arguments.all, "resume": arguments.resume}
    if arguments.what == "attention":
        from flexmasks.bench.attention import bench

        return bench(arguments.masks, arguments.scores, lengths=arguments.lengths, **where)
    from flexmasks.bench.blocks import blocks

    if arguments.scores:
        parser.error("bench blocks takes no --scores")
    return blocks(arguments.lengths, arguments.masks, **where)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _import(modules: list[str]) -> None:
    sys.path.insert(0, "")  # the installed command does not search the current folder otherwise
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(f"flexmasks: --import {module}: {error}.") from error


def _show(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    from flexmasks.pictures.show import draw

    name, length = arguments.name, arguments.length or 4096
    entries = [("mask", m) for m in list_masks()] + [("score", s) for s in list_scores()]
    named = [(kind, e) for kind, e in entries if e.name == name]  # a mask and a score may share a name
    if not named:
        definition("score" if difflib.get_close_matches(name, [s.name for s in list_scores()]) else "mask", name)
    for kind, entry in named:
        defined = definition(kind, name)
        complete = all(n in given for n, p in defined.parameters.items() if p.required) and given
        params = given if complete or not defined.example else {**defined.example(length), **given}
        shown = ", ".join(f"{n}={v!r:.60}" for n, v in params.items())
        print(f"{kind} {entry.signature}\n\n{defined.doc}\n\nhere {name}({shown})\n")
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
    """Read `--name value` pairs; a value is a Python literal or a word."""
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
