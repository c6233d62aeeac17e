"""Kinds of calls, which differ in the values of tensors only: the programs of their forms run, their kernels stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flexmasks.backends.call import Replay
from flexmasks.plans.recorded import Form
from flexmasks.spec.aliases import Aliases, in_one_piece
from flexmasks.spec.structure import Opaque


class CallKind:
    """All calls that differ from a first one in the values of tensors only, and makes the call with such tensors.

    It keeps no tensors but constants of functions.
    """

    def __init__(self, replay: Replay, forms: Sequence[Form], aliases: Aliases, tensors: Sequence[Tensor]) -> None:
        """Raises Opaque if the call cannot be made again.

        forms: what the call reads, a form behind those that it is made from; those without inputs stay.
        tensors: the tensors of the call.
        """
        learns = any(t.requires_grad for t in tensors)
        if learns and not all(type(t) in (Tensor, Parameter) and t.is_contiguous() and not vars(t) for t in tensors):
            raise Opaque("a tensor that learns beside one of which the call holds a copy")
        places = {id(t): n for n, t in enumerate(tensors)}
        if len(places) < len(tensors):
            raise Opaque("one tensor in two places, which may be two tensors in the next call")
        self._programs: list[tuple[Any, list[int]]] = []
        count, constants, spread = len(tensors), dict[int, Tensor](), list[tuple[int, torch.Size]]()
        for form in forms:
            if not form.inputs:
                constants |= {id(t): t for t in form.tensors}
                continue
            if form.program is None or any(id(t) not in places for t in form.inputs):
                raise Opaque("a form that is planned from the start")
            self._programs.append((form.program, [places[id(t)] for t in form.inputs]))
            places |= {id(t): count + n for n, t in enumerate(form.tensors)}
            count += len(form.tensors)
        in_functions = {}
        if replay.calls_functions:  # they hold aliases, or the tensors themselves where these learn or are a bias
            in_functions = {id(aliases.of(t)): n for n, t in enumerate(tensors) if not t.requires_grad} | places
        in_functions |= {key: n for key, n in places.items() if n >= len(tensors)}
        for form in forms:
            for number, expanded in form.spread:
                if id(number) in in_functions:  # others are constants of a function
                    in_functions[id(expanded)] = count + len(spread)
                    spread.append((in_functions[id(number)], expanded.shape))
        self._count, self._spread = len(tensors), spread
        read, captured, self._make = replay.taken()
        if any(id(t) not in places and id(t) not in constants for t in read):
            raise Opaque("a tensor that is made in another way")
        if learns and any(id(t) not in in_functions for t in captured):
            raise Opaque("a tensor that is made of one that learns")
        # The place of each tensor among those of a later call, or the constant itself.
        self._read = [(places.get(id(t)), constants.get(id(t))) for t in read]
        self._captured = [(in_functions.get(id(t)), None if id(t) in in_functions else t) for t in captured]

    def __call__(self, tensors: Sequence[Tensor]) -> Replay:
        """Return the call with these tensors. Gradients flow through those alone that functions read."""
        values = [t.detach() for t in tensors]
        for program, places in self._programs:
            values += program([values[n] for n in places])
        read = [t if n is None else values[n] for n, t in self._read]
        if not self._captured:
            return self._make(read, [])
        values[: self._count] = [in_one_piece(t if t.requires_grad else t.detach()) for t in tensors]
        values += [values[n].expand(shape) for n, shape in self._spread]
        return self._make(read, [t if n is None else values[n] for n, t in self._captured])
