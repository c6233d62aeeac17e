"""The command line: `python -m flexmasks demo`, `list`, `show`, `check` and `bench`."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import itertools
import operator
import os
import re
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate
from torch import Tensor

from flexmasks import __version__, get_mask, get_score, list_masks, list_scores
from flexmasks.pictures.output import check_kind, check_writable, text_width

if TYPE_CHECKING:
    from flexmasks.extend import Definition

_HINT = "`python -m flexmasks show NAME` draws one; `list --long` says more of each."
_LONG_LIST = 160  # characters of `list --long` where there is no terminal


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("show", "check", "bench"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    status = 0
    try:
        if getattr(arguments, "modules", None):
            import_modules(arguments.modules)
        if arguments.command is None:
            parser.print_help()
        elif arguments.command == "demo":
            from flexmasks.bench.demo import main as demo

            demo()
        elif arguments.command == "list":
            if arguments.given and not arguments.like:
                parser.error("--with gives values to the text of --like")
            print(_like(arguments) if arguments.like else tables(arguments.long))
        elif arguments.command == "bench":
            _bench(parser, arguments, _parameters(rest))
        elif arguments.command == "check":
            status = _check(arguments, _parameters(rest))
        else:
            _show(arguments, _parameters(rest))
        sys.stdout.flush()
    except (ValueError, TypeError, MemoryError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        is_in_words = str(error).startswith("flexmasks")
        if error.filename is None and not is_in_words:
            raise
        print(error if is_in_words else f"flexmasks: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flexmasks",
        description="Attention masks and score changes for PyTorch FlexAttention.",
        epilog="`python -m flexmasks COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"flexmasks {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parent = import_parser()
    _add_command(commands, "demo", "compute attention on this machine, check it, time it and draw its mask")
    list_parser = _add_command(commands, "list", "list the names and meanings of all masks and scores", parent)
    list_parser.add_argument("--long", action="store_true", help="also list parameters, sources and names in libraries")
    does = (
        "only what is most like this: the text of a function (b, h, q, kv), or of one that makes such a function or a "
        "dense mask, - for a text on stdin, module:name of one, or a name or words of another library. The function "
        "runs in this process, and is compared with every mask and with combinations of them"
    )
    list_parser.add_argument("--like", metavar="TEXT", help=does)
    does = "a value that the text leaves open, such as window=128; others are made up; may be repeated"
    list_parser.add_argument("--with", dest="given", metavar="NAME=VALUE", type=_given, action="append", help=does)
    _add_show_arguments(_add_command(commands, "show", "draw a mask or a score, and print its documentation", parent))
    does = "say what is wrong with a mask, and exit with 1 if something is"
    _add_check_arguments(_add_command(commands, "check", does, parent))
    does = "time a call of yours on this machine, against flex_attention and SDPA"
    _add_bench_arguments(_add_command(commands, "bench", does, parent))
    return parser


def import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    does = "first import a module that registers your own masks or scores; may be repeated"
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=does)
    return parser


def _add_command(commands: Any, name: str, does: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    description = f"{does[0].upper()}{does[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=does, description=description, parents=parents)
    return parser


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # a parameter may begin like an option, as --block does
    parser.usage = "python -m flexmasks show NAME [options] [--PARAMETER VALUE ...]"
    parser.epilog = (
        "Parameters of the mask or score are given by their names, with values as in Python: --window 64, "
        "--seq-lens [300,100], --causal True. By default they are those of an example."
    )
    parser.add_argument("name", metavar="NAME", help="the name of a mask or a score; `list` names all")
    _add_sizes(
        parser,
        ("--length", "number of queries (default: what the parameters suggest or 4096)"),
        ("--kv-length", "number of keys (default: the number of queries)"),
        ("--block-size", "positions in a block (default: 128, or 1 for short lengths)"),
    )
    for option, drawn in (("-b", "batch element"), ("--head", "head")):
        parser.add_argument(option, metavar="N", type=int, default=0, help=f"the {drawn} to draw (default: 0)")
    does = "also write the picture to a file: .svg, .html, .txt; with matplotlib .pdf, .png"
    parser.add_argument("--save", metavar="FILE", help=does)


def _add_sizes(parser: argparse.ArgumentParser, *options: tuple[str, str]) -> None:
    """Add options of numbers above 0, each with its meaning, and where the queries start."""
    for option, does in options:
        parser.add_argument(option, metavar="N", type=positive, help=does)
    does = "where the queries start: a position, first or last"
    parser.add_argument("--q-offset", metavar="N", type=_alignment, help=does)


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # a parameter may begin like an option
    parser.usage = "python -m flexmasks check MASK --length N [options] [--PARAMETER VALUE ...]"
    parser.epilog = (
        "Exits with 1 if there are errors, with 2 if the command is wrong, else with 0. The kinds of findings stand in "
        "help(flexmasks.check). Parameters of the mask are given by their names, with values as in Python, as in "
        "--window 64; by default those of a registered mask are an example's."
    )
    does = "module:name of a function (b, h, q, kv), Mask, BlockMask or boolean tensor of yours, or a registered name"
    parser.add_argument("mask", metavar="MASK", help=does)
    does = "number of queries, or all for a proof (default: those of a BlockMask or tensor)"
    parser.add_argument("--length", metavar="N", type=lambda n: n if n == "all" else positive(n), help=does)
    _add_sizes(
        parser,
        ("--kv-length", "number of keys (default: the number of queries)"),
        ("--batch", "number of batch elements, if the mask depends on them"),
        ("--heads", "number of heads, if the mask depends on them"),
    )
    does = "module:name, or a list, of the document of each position, which no pair may cross"
    parser.add_argument("--document-ids", metavar="IDS", help=does)
    does = 'a kind of finding that is an error, such as "sees the future" or sees-the-future; may be repeated'
    parser.add_argument("--forbid", metavar="KIND", action="append", default=[], help=does)


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # a parameter of a mask may begin like an option
    parser.usage = "python -m flexmasks bench --mask NAME --shape B,H,S,D [options]\n    [--PARAMETER VALUE ...]"
    parser.epilog = (
        "Parameters of the mask and the score are given by their names, with values as in Python: --window 1024. By "
        "default they are those of an example. Backward passes are timed on a GPU."
    )
    parser.add_argument("--mask", metavar="NAME", required=True, help="the name of a mask; `list` names all")
    does = "batch, query heads, tokens, and size of a head"
    parser.add_argument("--shape", metavar="B,H,S,D", type=_shape, required=True, help=does)
    parser.add_argument("--score", metavar="NAME", help="the name of a score modification")
    parser.add_argument("--kv-heads", metavar="N", type=positive, help="key heads (default: the query heads)")
    does = "of q, k and v (default: bfloat16 on a GPU, else float32)"
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help=does)
    does = "where to run (default: a GPU if the machine has one)"
    parser.add_argument("--device", choices=("cuda", "xpu", "mps", "cpu"), help=does)


def tables(long: bool = False) -> str:
    """The tables of masks and scores, as wide as the terminal: names and meanings, or with `long` also parameters,
    sources and names in other libraries.
    """
    listed = (("mask", list_masks()), ("score", list_scores()))
    rows: list[list[tuple[str, ...]]]
    if long:
        rows = [[(e.signature, e.summary, e.source, e.peers) for e in entries] for _, entries in listed]
        width = shutil.get_terminal_size((_LONG_LIST, 0)).columns - 6  # two spaces between columns
        widths = [max(8, width * part // 15) for part in (3, 5, 3, 4)]
    else:
        rows = [[(e.name, e.summary) for e in entries] for _, entries in listed]
        names = max(len(name) for name, *_ in itertools.chain(*rows))
        widths = [names, max(20, text_width() - names - 2)]
    headers = ["meaning", "source", "in other libraries"][: len(widths) - 1]
    text = "\n\n".join(
        tabulate(part, headers=[kind, *headers], maxcolwidths=widths, break_on_hyphens=False)
        for (kind, _), part in zip(listed, rows, strict=True)
    )
    return text if long else f"{text}\n\n{_HINT}"


def _like(arguments: argparse.Namespace) -> str:
    from flexmasks import alike
    from flexmasks.asking.named import entries_like

    text = sys.stdin.read() if arguments.like == "-" else arguments.like
    given = dict(arguments.given or ())
    if re.fullmatch(r"[\w./\\-]+:[\w.]+", text):
        return repr(alike(_of_module(text), **given))
    if not re.fullmatch(r"[\w\s.-]+", text) or re.search(r"\b(lambda|def)\b", text):
        return repr(alike(text, **given))
    found = entries_like(text)
    if not found:
        raise ValueError(f"flexmasks: nothing is named like {text!r}; paste its function, or see `list --long`.")
    rows = [(e.kind, e.signature, e.summary, e.peers) for e in found]
    width = shutil.get_terminal_size((_LONG_LIST, 0)).columns - 6 - len("score")
    widths = [5, *(max(8, width * part // 12) for part in (3, 4, 5))]
    headers = ["", "name", "meaning", "in other libraries"]
    return tabulate(rows, headers=headers, maxcolwidths=widths, break_on_hyphens=False)


def _given(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be a name and a value such as window=128, got {text}")
    return name, _literal(value)


def _bench(parser: argparse.ArgumentParser, arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    from flexmasks.bench.compare import compare
    from flexmasks.extend import definition

    gpu = torch.accelerator.current_accelerator(check_available=True)
    here = "cpu" if gpu is None else gpu.type
    if arguments.device not in (None, "cpu", here):
        parser.error(f"--device {arguments.device}: torch finds no such GPU on this machine")
    batch, heads, length, size = arguments.shape
    kv_heads = arguments.kv_heads or heads
    if heads % kv_heads:
        parser.error(f"--kv-heads must divide the {heads} query heads, got {kv_heads}")
    named = [("mask", arguments.mask), *([("score", arguments.score)] if arguments.score else [])]
    defined = [definition(kind, name) for kind, name in named]
    for parameter in given:
        if not any(parameter in one.parameters for one in defined):
            known = ", ".join(f"`{n}`" for one in defined for n in one.parameters) or "none"
            raise ValueError(f"flexmasks: there is no parameter `{parameter}`; the parameters here are {known}.")
    own = [{n: value for n, value in given.items() if n in one.parameters} for one in defined]
    made = [_with_example(one, params, length) for one, params in zip(defined, own, strict=True)]
    mask = get_mask(arguments.mask, **made[0])
    score = get_score(arguments.score, **made[1]) if arguments.score else None
    device = arguments.device or here
    dtype = getattr(torch, arguments.dtype or ("float32" if device == "cpu" else "bfloat16"))
    q, k, v = (torch.randn(batch, h, length, size, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    print(compare(mask, score, q, k, v))


def _check(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from flexmasks import check

    mask, ids, every = arguments.mask, arguments.document_ids, arguments.length == "all"
    length = None if every else arguments.length
    if ":" in mask:
        mask = _of_module(mask)
    else:
        from flexmasks.extend import definition

        given = _with_example(definition("mask", mask), given, length or 4096)
    if length is None and not every and (isinstance(mask, str) or callable(mask)):  # a BlockMask or tensor has its own
        raise ValueError("flexmasks: pass --length N, the number of queries, or --length all for a proof.")
    found = check(
        mask,
        length,
        arguments.kv_length,
        batch=arguments.batch,
        heads=arguments.heads,
        q_offset=arguments.q_offset,
        document_ids=_of_module(ids) if ids and ids[0] not in "[(" else ids and _literal(ids),
        forbid=arguments.forbid,
        lengths="all" if every else None,
        **given,
    )
    print(found)
    return 1 if found.errors else 0


def _of_module(text: str) -> Any:
    """Return what `module:name` or `module.py:name` names, of a module that is found in the current folder too."""
    module, _, names = text.partition(":")
    module = module.removesuffix(".py").replace("/", ".")
    import_modules([module])
    try:
        return operator.attrgetter(names)(sys.modules[module])
    except AttributeError as error:
        raise ValueError(f"flexmasks: {text}: {error}.") from error


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(positive(size.strip()) for size in text.split(","))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"must be four numbers B,H,S,D, got {text}")
    return sizes


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _alignment(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # `draw` says which words there are


def import_modules(modules: list[str]) -> None:
    sys.path.insert(0, "")  # the installed command does not search the current folder otherwise
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(f"flexmasks: --import {module}: {error}.") from error


def _show(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    from flexmasks import draw  # this and `extend` take longer to import than a list takes
    from flexmasks.extend import definition

    name, length, width = arguments.name, arguments.length or 4096, text_width()
    named = [e for e in (*list_masks(), *list_scores()) if e.name == name]  # a mask and a score may share a name
    if not named:
        definition("score" if difflib.get_close_matches(name, [s.name for s in list_scores()]) else "mask", name)
    if arguments.save:
        check_kind(Path(arguments.save))
        check_writable(Path(arguments.save))
    for entry in named:
        kind = entry.kind
        defined = definition(kind, name)
        complete = given and _is_complete(defined, given)
        params = _with_example(defined, given, length)
        shown = ", ".join(f"{n}={_SHOWN.repr(v)}" for n, v in params.items())
        print(_filled(f"{kind} {entry.signature}", width), end="\n\n")
        print(*_wrapped_doc(defined.doc, width), sep="\n")
        print(_filled(f"here {name}({shown})", width), end="\n\n")
        picture = draw(
            get_mask(name, **params) if kind == "mask" else get_score(name, **params),
            arguments.length or (None if complete else length),
            arguments.kv_length,
            b=arguments.b,
            h=arguments.head,
            block_size=arguments.block_size,
            q_offset=arguments.q_offset,
        )
        print(f"{picture}\n")
        if arguments.save and entry is named[0]:
            print(f"written to {picture.save(arguments.save)}\n")


def _with_example(defined: Definition, given: dict[str, Any], length: int) -> dict[str, Any]:
    """The given parameters; if some are missing, an example's with the given ones."""
    if (given and _is_complete(defined, given)) or not defined.example:
        return given
    try:
        example = defined.example(length)
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"flexmasks: the example of {defined.kind} {defined.name!r} fails for length {length} "
            f"({type(error).__name__}: {error}); pass another --length, or all parameters."
        ) from error
    return {**example, **given}


def _is_complete(defined: Definition, given: dict[str, Any]) -> bool:
    return all(name in given for name, parameter in defined.parameters.items() if parameter.required)


class _Shown(reprlib.Repr):
    """Values as short text: long lists end with their length, tensors are their dtype and shape. Reprlib calls the
    methods by the names of the types.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlist, self.maxtuple, self.maxlevel, self.maxother = 8, 8, 3, 200

    def repr_list(self, x: list[Any], level: int) -> str:
        text = super().repr_list(x, level)
        return f"{text[:-1]} {len(x)} values]" if len(x) > self.maxlist and level > 0 else text

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        text = super().repr_tuple(x, level)
        return f"{text[:-1]} {len(x)} values)" if len(x) > self.maxtuple and level > 0 else text

    def repr_Tensor(self, x: Tensor, level: int) -> str:
        from flexmasks.extend import in_message

        return in_message(x)


_SHOWN = _Shown()


def _wrapped_doc(doc: str, width: int) -> Iterator[str]:
    """Yield the lines of a docstring, with paragraphs of longer lines wrapped at words. A line `name: text` starts an
    item, whose further lines are indented.
    """
    for paragraph in doc.split("\n\n"):
        if all(len(line) <= width for line in paragraph.splitlines()):
            yield from paragraph.splitlines()
        else:
            items = re.split(r"\n(?=[\w, ]+: )", paragraph)
            yield from (_filled(item, width, "    " if re.match(r"[\w, ]+: ", item) else "") for item in items)
        yield ""


def _filled(text: str, width: int, indent: str = "    ") -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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
